"""The correction in plain torch, on any device: what every fused implementation is compared with."""

from __future__ import annotations

from torch import Tensor

from megatron_tim.correction.bias import EXACT, bias_sums
from megatron_tim.correction.config import CorrectionConfig
from megatron_tim.correction.displacement_metrics import displacement_sums
from megatron_tim.correction.lam import lam_sums
from megatron_tim.correction.metrics import ACTIVE, SHADOW, sequence_sums, token_sums, weight_sums
from megatron_tim.correction.sums import MetricSums
from megatron_tim.correction.tokens import TokenBatch
from megatron_tim.correction.weigh import Weighing, weigh


def evaluate(
    train: Tensor, rollout: Tensor, mask: Tensor, valid: Tensor, config: CorrectionConfig, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, MetricSums]:
    """Weights and keep mask of the active method, and the sums behind every metric.

    Args:
        train, rollout: ``[B, T]`` or ``[T]``, floating point; log-probs, finite where ``valid``.
        mask, valid: bool, same shape; the sampled tokens, and those of them that count.
        config: the methods, and what is measured.
        cu_seqlens: None for padded, ``[N + 1]`` for packed.

    Returns:
        ``weights`` fp32 and ``keep`` bool, both in the inputs' shape, weights 0 outside keep; and the sums.
    """
    tokens = TokenBatch.from_logprobs(train, rollout, mask, valid, cu_seqlens)
    active = weigh(tokens, config)
    sums = token_sums(tokens, config.cap) + sequence_sums(tokens) + _method_sums(tokens, active, config, ACTIVE)
    for name, method in config.shadows.items():
        sums += _method_sums(tokens, weigh(tokens, method), config, f"{SHADOW}{name}/")
    if config.diagnostics:
        sums += displacement_sums(tokens, config.displacement_cut)
        sums += bias_sums(tokens, tokens.ratio).with_prefix(EXACT)
    if config.auto_lam.measure:
        sums += lam_sums(tokens, active.applied, config.kappa, config.auto_lam.weighting)
    return active.applied.float(), active.keep, sums


def _method_sums(tokens: TokenBatch, weighing: Weighing, config: CorrectionConfig, prefix: str) -> MetricSums:
    sums = weight_sums(tokens, weighing)
    if config.diagnostics:
        sums += bias_sums(tokens, weighing.applied)
    return sums.with_prefix(prefix)
