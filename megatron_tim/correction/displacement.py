"""The quantities a mismatch is measured by: the ratio k, the log-odds displacement eps, and the room 1 - p.

Every function takes log-probs of the sampled tokens, works element by element in the dtype it is given, and
holds for probabilities that are 0 or that round to 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Every ratio is held at exp(20) = 4.9e8, verl's bound, so that a single absurd token cannot turn a weight or a
# sum into inf. Downwards a ratio ends at 0 by itself.
LOG_RATIO_BOUND = 20.0


def mismatch_ratio(train_logprobs: Tensor, rollout_logprobs: Tensor) -> Tensor:
    """k = p / q = exp(logp_train - logp_rollout), at most exp(20).

    Args:
        train_logprobs: any shape, floating point: log p under the training engine.
        rollout_logprobs: same shape: log q as the rollout engine recorded it.
    """
    return bounded_ratio(train_logprobs, rollout_logprobs)


def bounded_ratio(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """exp(logprobs - reference), at most exp(20): finite for every finite input."""
    return torch.exp((logprobs - reference_logprobs).clamp(max=LOG_RATIO_BOUND))


def one_minus_p(logprobs: Tensor) -> Tensor:
    """1 - p without the cancellation of the plain formula; 0 where rounding made a log-prob positive."""
    return torch.expm1(logprobs.clamp(max=0)).abs()


def log_odds(logprobs: Tensor) -> Tensor:
    """logit(p) = log p - log(1 - p); +inf at p = 1 and -inf at p = 0."""
    return logprobs - torch.log(one_minus_p(logprobs))


def displacement(train_logprobs: Tensor, rollout_logprobs: Tensor) -> Tensor:
    """eps = logit(p) - logit(q), so that k = p + (1 - p) e^eps (Lemma 3.1 of the CIS paper, arXiv 2609.32444).

    Equal log-probs give exactly 0, also where both engines rounded to p = 1 or p = 0; otherwise a
    probability of exactly 1 or 0 on one side gives an infinite eps.
    """
    log_ratio = torch.where(train_logprobs == rollout_logprobs, 0, train_logprobs - rollout_logprobs)
    return log_displacement(log_ratio, one_minus_p(train_logprobs), one_minus_p(rollout_logprobs))


def log_displacement(log_ratio: Tensor, train_room: Tensor, rollout_room: Tensor) -> Tensor:
    """eps = log k + log((1 - q) / (1 - p)): :func:`displacement` from quantities at hand."""
    # Equal rooms, 0 and 0 among them, add nothing.
    return torch.where(train_room == rollout_room, log_ratio, log_ratio + torch.log(rollout_room / train_room))
