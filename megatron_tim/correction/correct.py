"""The correction of a batch: log-probs of both engines in; weights, what to keep, and metrics out."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from megatron_tim.correction.config import CorrectionConfig
from megatron_tim.correction.metrics import correction_metrics
from megatron_tim.correction.reference import evaluate
from megatron_tim.correction.sums import MetricSums
from megatron_tim.correction.validation import (
    check_layout,
    check_not_positive,
    check_temperatures,
    check_token_tensors,
    finite_tokens,
)

# A product of ratios over more tokens than this is dominated by its length.
LONG_SEQUENCE = 1000


@dataclass(frozen=True)
class Correction:
    """What :func:`correct` found.

    Attributes:
        weights: fp32, detached, the inputs' shape; 0 outside ``keep``.
        keep: bool; the mask minus tokens that a rule rejected or that have a non-finite log-prob. A token that its
            weight alone takes out (icepop, kpop, seq_mis) is still kept.
        sums: what ``metrics`` is made of; add or all-reduce these to get the metrics of several batches together.
    """

    weights: Tensor
    keep: Tensor
    sums: MetricSums

    @cached_property
    def metrics(self) -> dict[str, float]:
        """The metrics of this batch, as listed in :mod:`megatron_tim.correction.metrics`."""
        return correction_metrics(self.sums)


def correct(
    train_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    config: CorrectionConfig,
    cu_seqlens: Tensor | None = None,
    *,
    train_temperature: float = 1.0,
    rollout_temperature: float = 1.0,
) -> Correction:
    """Weighs the sampled tokens by how far the training engine's probability is from the rollout engine's.

    A token's weight is its token weight times its sequence's weight (:mod:`megatron_tim.correction.weights`), and 0
    where a rule rejects it (:mod:`megatron_tim.correction.rejection`). A token whose log-prob is NaN or infinite on
    either side is dropped (weight 0, ``keep`` False) and counted.

    Args:
        train_logprobs: ``[B, T]`` padded, or ``[T]`` packed; log p of the old policy under the training engine, of the
            distribution that was sampled from (after temperature).
        rollout_logprobs: same shape; log q as the rollout engine recorded it when it sampled.
        mask: bool, same shape; True on sampled tokens. What the others hold is never read.
        config: the method and its parameters.
        cu_seqlens: int32 or int64 ``[N + 1]``, starts of the packed sequences, from 0 to T; None for padded.
        train_temperature, rollout_temperature: what each engine's logits were divided by; they must be equal, since no
            log-prob can be moved to another temperature afterwards.

    Raises:
        ValueError: a wrong shape, dtype, device or value; names the argument and the value.
    """
    check_token_tensors("train_logprobs", train_logprobs=train_logprobs, rollout_logprobs=rollout_logprobs, mask=mask)
    check_layout("train_logprobs", train_logprobs, cu_seqlens)
    check_temperatures(train_temperature, rollout_temperature)
    valid = finite_tokens(mask, train_logprobs, rollout_logprobs)
    check_not_positive("train_logprobs", train_logprobs, valid)
    check_not_positive("rollout_logprobs", rollout_logprobs, valid)
    return correct_checked(train_logprobs, rollout_logprobs, mask, valid, config, cu_seqlens)


def correct_checked(
    train_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, valid: Tensor, config: CorrectionConfig, cu_seqlens: Tensor | None
) -> Correction:
    """:func:`correct` on inputs that were checked; what bypass mode runs in each micro-batch."""
    _warn_of_long_products(config, valid, cu_seqlens)
    return Correction(*evaluate(train_logprobs.detach(), rollout_logprobs.detach(), mask, valid, config, cu_seqlens))


def _warn_of_long_products(config: CorrectionConfig, valid: Tensor, cu_seqlens: Tensor | None) -> None:
    if config.sequence_method == "none" or config.length_normalised or not valid.numel():
        return
    longest = valid.shape[-1] if cu_seqlens is None else int(cu_seqlens.diff().max())
    if longest > LONG_SEQUENCE:
        warnings.warn(
            f"{config.sequence_method} multiplies the ratios of up to {longest} tokens, which shrinks long healthy sequences;"
            " set length_normalised=true, or use a token method.",
            stacklevel=3,
        )
