"""The correction's weights: one pure function a method, from the mismatch ratio k = p / q to a weight.

p is the probability that the training engine gives to a sampled token, q the one the rollout engine recorded. A token's
weight is the product of its token weight (``method``) and of its sequence's weight (``sequence``).
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from megatron_tim.correction.config import Method
from megatron_tim.correction.displacement import LOG_RATIO_BOUND, one_minus_p
from megatron_tim.correction.tokens import TokenBatch

# kpop forms binary KL divergences; probabilities nearer to 0 or 1 than this are moved here first.
KPOP_PROBABILITY_CLAMP = 1e-6


class TokenWeight(Protocol):
    def __call__(self, tokens: TokenBatch, method: Method) -> Tensor:
        """The weight of each token, fp64, in the shape of the batch."""


def no_weight(tokens: TokenBatch, method: Method) -> Tensor:
    """1: the mismatch is left as it is."""
    return torch.ones_like(tokens.ratio)


def exact_weight(tokens: TokenBatch, method: Method) -> Tensor:
    """k: unbiased, with the whole variance of its tail (held at exp(20))."""
    return tokens.ratio


def truncated_weight(tokens: TokenBatch, method: Method) -> Tensor:
    """min(k, C): truncated importance sampling."""
    return tokens.ratio.clamp(max=method.cap)


def confidence_weight(tokens: TokenBatch, method: Method) -> Tensor:
    """min(k, 1 + lam * max(1 - p, kappa)): CIS, with p the train probability (CIS paper, arXiv 2609.32444)."""
    return torch.minimum(tokens.ratio, confidence_cap(tokens.train, method.lam_value, method.kappa))


def confidence_cap(train_logprobs: Tensor, lam: float, kappa: float) -> Tensor:
    """1 + lam * max(1 - p, kappa): the k at which the displacement reaches log(1 + lam), where 1 - p > kappa."""
    return 1 + lam * one_minus_p(train_logprobs).clamp(min=kappa)


def band_weight(tokens: TokenBatch, method: Method) -> Tensor:
    """clip(k, low, high): both sides, an ablation of the CIS paper; lifting small k hurts."""
    return tokens.ratio.clamp(*method.bounds)


def icepop_weight(tokens: TokenBatch, method: Method) -> Tensor:
    """k if low <= k <= high, else 0."""
    low, high = method.bounds
    return torch.where((tokens.ratio >= low) & (tokens.ratio <= high), tokens.ratio, 0)


def kpop_weight(tokens: TokenBatch, method: Method) -> Tensor:
    """k if KL(p, q) <= phi and KL(q, p) <= phi, else 0; the binary KL of sampling this token or another."""
    low, high = math.log(KPOP_PROBABILITY_CLAMP), math.log1p(-KPOP_PROBABILITY_CLAMP)
    train, rollout = tokens.train.clamp(low, high), tokens.rollout.clamp(low, high)
    near = (_binary_kl(train, rollout) <= method.phi) & (_binary_kl(rollout, train) <= method.phi)
    return torch.where(near, tokens.ratio, 0)


def _binary_kl(logprobs: Tensor, other: Tensor) -> Tensor:
    """a log(a / b) + (1 - a) log((1 - a) / (1 - b)) of two log-probs."""
    room, other_room = one_minus_p(logprobs), one_minus_p(other)
    return logprobs.exp() * (logprobs - other) + room * torch.log(room / other_room)


TOKEN_WEIGHTS: dict[str, TokenWeight] = {
    "none": no_weight,
    "exact": exact_weight,
    "tis": truncated_weight,
    "cis": confidence_weight,
    "band": band_weight,
    "icepop": icepop_weight,
    "kpop": kpop_weight,
}


def sequence_ratio(tokens: TokenBatch, method: Method) -> Tensor:
    """prod k of each sequence, or its geometric mean where ``length_normalised``; 1 without tokens; at most exp(20)."""
    log_product = tokens.sequence_sum(tokens.log_ratio)
    if method.length_normalised:
        log_product = log_product / tokens.length.clamp(min=1)
    return log_product.clamp(max=LOG_RATIO_BOUND).exp()


def sequence_weight(tokens: TokenBatch, method: Method) -> Tensor:
    """The weight of each sequence: ``seq_tis`` min(R, C), ``seq_mis`` R if R <= C else 0, R being :func:`sequence_ratio`."""
    ratio = sequence_ratio(tokens, method)
    if method.sequence_method == "seq_tis":
        return ratio.clamp(max=method.sequence_cap)
    return torch.where(ratio <= method.sequence_cap, ratio, 0)
