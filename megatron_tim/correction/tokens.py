"""The tokens of a batch as every formula needs them: fp64, valid or neutral, with their sequences."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megatron_tim.correction.displacement import LOG_RATIO_BOUND, log_displacement, one_minus_p
from megatron_tim.correction.sequences import sequence_sum, to_tokens


@dataclass(frozen=True)
class TokenBatch:
    """A padded ``[B, T]`` or packed ``[T]`` batch; a token that is not valid has k = 1, so that it adds 0 to every sum.

    Attributes:
        train, rollout: float64; log p and log q, 0 where not valid.
        mask: bool; the sampled tokens.
        valid: bool; those of them that count: both log-probs are finite.
        cu_seqlens: None for padded, ``[N + 1]`` for packed.
    """

    train: Tensor
    rollout: Tensor
    mask: Tensor
    valid: Tensor
    cu_seqlens: Tensor | None

    @classmethod
    def from_logprobs(cls, train: Tensor, rollout: Tensor, mask: Tensor, valid: Tensor, cu_seqlens: Tensor | None) -> TokenBatch:
        train, rollout = (torch.where(valid, values.detach().double(), 0) for values in (train, rollout))
        return cls(train, rollout, mask, valid, cu_seqlens)

    @cached_property
    def log_ratio(self) -> Tensor:
        """log k = log p - log q; exact for fp32 log-probs."""
        return self.train - self.rollout

    @cached_property
    def excess(self) -> Tensor:
        """k - 1, with the digits that k itself loses near 1; k is at most exp(20)."""
        return torch.expm1(self.log_ratio.clamp(max=LOG_RATIO_BOUND))

    @cached_property
    def ratio(self) -> Tensor:
        """k."""
        return 1 + self.excess

    @cached_property
    def room(self) -> Tensor:
        """1 - p: the room that is left above the train probability."""
        return one_minus_p(self.train)

    @cached_property
    def displacement(self) -> Tensor:
        """eps = logit(p) - logit(q); infinite where one side rounded to certainty."""
        return log_displacement(self.log_ratio, self.room, one_minus_p(self.rollout))

    @cached_property
    def length(self) -> Tensor:
        """float64 ``[B]`` or ``[N]``: the valid tokens of each sequence."""
        return self.sequence_sum(self.valid)

    def sequence_sum(self, values: Tensor) -> Tensor:
        """The sum over each sequence, float64 ``[B]`` or ``[N]``."""
        return sequence_sum(values, self.cu_seqlens)

    def to_tokens(self, values: Tensor) -> Tensor:
        """A value a sequence, ``[B]`` or ``[N]``, at each of its tokens."""
        return to_tokens(values, self.valid, self.cu_seqlens)
