"""Policy losses: one pure function a loss, from log-probs to the loss of each token."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from megatron_tim.correction.displacement import bounded_ratio
from megatron_tim.correction.loss_config import LossConfig
from megatron_tim.correction.sequences import sequence_mean

Flags = dict[str, Tensor]


class TokenLoss(Protocol):
    def __call__(self, logprobs: Tensor, ratio: Tensor, advantages: Tensor, config: LossConfig) -> tuple[Tensor, Flags]:
        """The unweighted loss of each token, and bool flags of each token by metric name."""


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    config: LossConfig,
    *,
    valid: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Flags]:
    """The loss of each token, times its correction weight; the gradient flows through ``logprobs`` alone.

    Args:
        logprobs: any shape (gspo: ``[B, T]``, or ``[T]`` with ``cu_seqlens``), fp32 or fp64: log pi_theta of the sampled
            tokens. Every input must be finite.
        old_logprobs: same shape: log of the policy that r is relative to (pi_old, or pi_rollout in bypass mode).
        advantages: same shape.
        weights: same shape; the correction's weights.
        config: the loss and its clip range.
        valid: bool, same shape: the tokens that a sequence consists of (gspo); None for all of them.
        cu_seqlens: ``[N + 1]``, the packed sequences (gspo).

    Returns:
        The loss of each token, and bool flags of each token (``clip_high``, ``clip_low``, ``dual_clip``) for metrics.
    """
    old_logprobs, advantages = old_logprobs.detach(), advantages.detach()
    whole_sequence = config.name == "gspo"
    ratio = geometric_ratio(logprobs, old_logprobs, valid, cu_seqlens) if whole_sequence else bounded_ratio(logprobs, old_logprobs)
    loss, flags = TOKEN_LOSSES[config.name](logprobs, ratio, advantages, config)
    return weights.detach() * loss, flags


def geometric_ratio(logprobs: Tensor, old_logprobs: Tensor, valid: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """GSPO's r = (pi / pi_old)^(1/T) of the whole sequence, at each of its tokens, with the gradient of that token alone.

    This is the token form of the GSPO paper (arXiv 2507.18071, section 4.3): the gradient of the sum over a sequence
    is r A grad log pi, so that a token's weight and its advantage act on its own gradient.
    """
    log_ratio = (logprobs - old_logprobs).detach()
    mean = sequence_mean(log_ratio, torch.ones_like(log_ratio, dtype=torch.bool) if valid is None else valid, cu_seqlens)
    return bounded_ratio(mean.to(logprobs.dtype) + logprobs - logprobs.detach(), torch.zeros_like(logprobs))


def reinforce(logprobs: Tensor, ratio: Tensor, advantages: Tensor, config: LossConfig) -> tuple[Tensor, Flags]:
    """-A log pi_theta."""
    return -advantages * logprobs, {}


def clipped(logprobs: Tensor, ratio: Tensor, advantages: Tensor, config: LossConfig) -> tuple[Tensor, Flags]:
    """PPO and GSPO: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), at most -dual_clip A where A < 0."""
    clip_low, clip_high = config.clips
    low, high = 1 - clip_low, 1 + clip_high
    loss = torch.maximum(-ratio * advantages, -ratio.clamp(low, high) * advantages)
    # The clip matters, and stops the gradient, only on the side that would raise the objective further.
    flags = {"clip_high": (ratio > high) & (advantages > 0), "clip_low": (ratio < low) & (advantages < 0)}
    if config.dual_clip is not None:
        flags["dual_clip"] = (advantages < 0) & (ratio > config.dual_clip)
        loss = torch.where(advantages < 0, torch.minimum(loss, -config.dual_clip * advantages), loss)
    return loss, flags


def cispo(logprobs: Tensor, ratio: Tensor, advantages: Tensor, config: LossConfig) -> tuple[Tensor, Flags]:
    """-A sg(clip(r, 1 - clip_low, 1 + clip_high)) log pi_theta: a clipped token keeps its gradient (arXiv 2506.13585)."""
    clip_low, clip_high = config.clips
    low, high = (0.0 if clip_low is None else 1 - clip_low), 1 + clip_high
    flags = {"clip_high": ratio > high, "clip_low": ratio < low}
    return -advantages * ratio.detach().clamp(low, high) * logprobs, flags


TOKEN_LOSSES: dict[str, TokenLoss] = {"reinforce": reinforce, "ppo": clipped, "gspo": clipped, "cispo": cispo}


def reference_kl(logprobs: Tensor, reference_logprobs: Tensor, estimator: str) -> Tensor:
    """An estimate of KL(pi_theta || pi_ref) at each sampled token, with gradient; s = log pi_theta - log pi_ref.

    ``k1`` s, ``k2`` s^2 / 2, ``k3`` e^-s - 1 + s (e^-s at most exp(20)).
    """
    difference = logprobs - reference_logprobs.detach()
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    return bounded_ratio(reference_logprobs.detach(), logprobs) - 1 + difference
