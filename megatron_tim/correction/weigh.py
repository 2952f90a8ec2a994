"""A method applied to a batch: token weight, sequence weight and rejection rules together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_tim.correction.config import Method
from megatron_tim.correction.rejection import reject
from megatron_tim.correction.tokens import TokenBatch
from megatron_tim.correction.weights import TOKEN_WEIGHTS, sequence_ratio, sequence_weight


@dataclass(frozen=True)
class Weighing:
    """What a method makes of a batch.

    Attributes:
        weights: float64, token times sequence weight, before rejection; of no meaning on invalid tokens.
        capped: bool, the valid tokens whose token weight is below k.
        sequence_weights: float64 ``[B]`` or ``[N]``, and ``sequence_capped`` bool, those below prod k; None without.
        keep: bool, the valid tokens that no rule rejects.
        by_rule: bool, the tokens that each rule rejects, by its name.
    """

    weights: Tensor
    capped: Tensor
    sequence_weights: Tensor | None
    sequence_capped: Tensor | None
    keep: Tensor
    by_rule: dict[str, Tensor]

    @property
    def applied(self) -> Tensor:
        """float64: the weights, 0 on tokens that are not kept."""
        return torch.where(self.keep, self.weights, 0)


def weigh(tokens: TokenBatch, method: Method) -> Weighing:
    """Applies ``method`` to the valid tokens."""
    weights = TOKEN_WEIGHTS[method.token_method](tokens, method)
    capped = tokens.valid & (weights < tokens.ratio)
    of_sequence = sequence_capped = None
    if method.sequence_method != "none":
        of_sequence = sequence_weight(tokens, method)
        sequence_capped = of_sequence < sequence_ratio(tokens, method)
        weights = weights * tokens.to_tokens(of_sequence)
    by_rule = reject(tokens, method.reject)
    keep = tokens.valid
    for rejected in by_rule.values():
        keep = keep & ~rejected
    return Weighing(weights, capped, of_sequence, sequence_capped, keep, by_rule)
