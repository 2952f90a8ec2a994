"""The correction of a batch: log-probs of both engines in; weights, what to keep, and metrics out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from megatron_tim.correction.config import CorrectionConfig
from megatron_tim.correction.displacement import mismatch_ratio
from megatron_tim.correction.metrics import correction_metrics, sequence_sums, token_sums
from megatron_tim.correction.sums import MetricSums
from megatron_tim.correction.validation import check_layout, check_not_positive, check_token_tensors, finite_tokens
from megatron_tim.correction.weights import TOKEN_WEIGHTS


@dataclass(frozen=True)
class Correction:
    """What :func:`correct` found.

    Attributes:
        weights: fp32, detached, the inputs' shape; 0 outside ``keep``.
        keep: bool; the mask minus tokens with a non-finite log-prob.
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
) -> Correction:
    """Weighs the sampled tokens by how far the training engine's probability is from the rollout engine's.

    A token whose log-prob is NaN or infinite on either side is dropped (weight 0, ``keep`` False) and counted.

    Args:
        train_logprobs: ``[B, T]`` padded, or ``[T]`` packed; log p of the old policy under the training engine, of the
            distribution that was sampled from (after temperature).
        rollout_logprobs: same shape; log q as the rollout engine recorded it when it sampled.
        mask: bool, same shape; True on sampled tokens. What the others hold is never read.
        config: the method and its parameters.
        cu_seqlens: int32 or int64 ``[N + 1]``, starts of the packed sequences, from 0 to T; None for padded.

    Raises:
        ValueError: a wrong shape, dtype, device or value; names the argument and the value.
    """
    check_token_tensors("train_logprobs", train_logprobs=train_logprobs, rollout_logprobs=rollout_logprobs, mask=mask)
    check_layout(train_logprobs, cu_seqlens)
    valid = finite_tokens(mask, train_logprobs, rollout_logprobs)
    check_not_positive("train_logprobs", train_logprobs, valid)
    check_not_positive("rollout_logprobs", rollout_logprobs, valid)
    tokens = weigh_tokens(train_logprobs, rollout_logprobs, mask, valid, config)
    sequences = sequence_sums(train_logprobs.detach(), rollout_logprobs.detach(), valid, cu_seqlens)
    return replace(tokens, sums=tokens.sums + sequences)


def weigh_tokens(train_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, valid: Tensor, config: CorrectionConfig) -> Correction:
    """:func:`correct` on checked inputs of any one shape, without the metrics of whole sequences.

    This is what bypass mode runs in each micro-batch, where ``train_logprobs`` are those of the current policy.
    """
    dtype = torch.promote_types(torch.promote_types(train_logprobs.dtype, rollout_logprobs.dtype), torch.float32)
    train, rollout = train_logprobs.detach().to(dtype), rollout_logprobs.detach().to(dtype)
    ratio = mismatch_ratio(train, rollout)
    weights = TOKEN_WEIGHTS[config.method](ratio, train, config)
    capped = valid & (weights < ratio)  # before rounding to fp32, which would make some uncapped weights smaller than k
    weights = torch.where(valid, weights, 0).float()
    return Correction(weights, valid, token_sums(train, rollout, weights, capped, mask, valid, config.cap))
