"""Token weights: one pure function a method, from the ratio k and the train log-probs to the weight."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from megatron_tim.correction.config import CorrectionConfig
from megatron_tim.correction.displacement import one_minus_p


class TokenWeight(Protocol):
    def __call__(self, ratio: Tensor, train_logprobs: Tensor, config: CorrectionConfig) -> Tensor:
        """The weight of each token, in the shape and dtype of ``ratio`` = k."""


def no_weight(ratio: Tensor, train_logprobs: Tensor, config: CorrectionConfig) -> Tensor:
    """1: the mismatch is left as it is."""
    return torch.ones_like(ratio)


def truncated_weight(ratio: Tensor, train_logprobs: Tensor, config: CorrectionConfig) -> Tensor:
    """min(k, C): truncated importance sampling."""
    return ratio.clamp(max=config.cap)


def confidence_weight(ratio: Tensor, train_logprobs: Tensor, config: CorrectionConfig) -> Tensor:
    """min(k, 1 + lam * max(1 - p, kappa)): CIS, with p the train probability (CIS paper, arXiv 2609.32444)."""
    return torch.minimum(ratio, confidence_cap(train_logprobs, config.lam, config.kappa))


def confidence_cap(train_logprobs: Tensor, lam: float, kappa: float) -> Tensor:
    """1 + lam * max(1 - p, kappa): the k at which the displacement reaches log(1 + lam), where 1 - p > kappa."""
    return 1 + lam * one_minus_p(train_logprobs).clamp(min=kappa)


TOKEN_WEIGHTS: dict[str, TokenWeight] = {"none": no_weight, "tis": truncated_weight, "cis": confidence_weight}
