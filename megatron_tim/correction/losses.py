"""Policy losses: one pure function a loss, from log-probs to the loss of each token."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from megatron_tim.correction.config import LossConfig
from megatron_tim.correction.displacement import bounded_ratio


class TokenLoss(Protocol):
    def __call__(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, config: LossConfig) -> tuple[Tensor, dict[str, Tensor]]:
        """The unweighted loss of each token, and bool flags of each token by metric name."""


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, weights: Tensor, config: LossConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of each token, times its correction weight; the gradient flows through ``logprobs`` alone.

    Args:
        logprobs: any shape, fp32 or fp64: log pi_theta of the sampled tokens. Every input must be finite.
        old_logprobs: same shape: log of the policy that r is relative to (pi_old, or pi_rollout in bypass mode).
        advantages: same shape.
        weights: same shape; the correction's weights.
        config: the loss and its clip range.

    Returns:
        The loss of each token, and bool flags of each token (``clip_high``, ``clip_low`` for ppo) for metrics.
    """
    loss, flags = TOKEN_LOSSES[config.name](logprobs, old_logprobs.detach(), advantages.detach(), config)
    return weights.detach() * loss, flags


def reinforce(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, config: LossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """-A log pi_theta."""
    return -advantages * logprobs, {}


def ppo(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, config: LossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = pi_theta / pi_old at most exp(20)."""
    ratio = bounded_ratio(logprobs, old_logprobs)
    low, high = 1 - config.clip_low, 1 + config.clip_high
    loss = torch.maximum(-ratio * advantages, -ratio.clamp(low, high) * advantages)
    # The clip matters, and stops the gradient, only on the side that would raise the objective further.
    flags = {"clip_high": (ratio > high) & (advantages > 0), "clip_low": (ratio < low) & (advantages < 0)}
    return loss, flags


TOKEN_LOSSES: dict[str, TokenLoss] = {"reinforce": reinforce, "ppo": ppo}
