"""Truncation bias and added variance of a method, by the confidence of the token.

Tokens are drawn from the rollout policy, under which the weight k is unbiased. With f the weight a method gives (0 where it
rejects), over all valid tokens:

- bias: E[k - f], and E[|k - f|];
- added variance: Var(f); not correcting at all (f = 1) adds 0, and exact correction adds Var(k);
- both also of g f with g = 1 - p, which stands for the norm of a token's score.

Every quantity is split by the train probability p so that the parts add up to the whole.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatron_tim.correction.sketch import CONFIDENCE_NAMES, confidence_bin
from megatron_tim.correction.sums import MetricSums
from megatron_tim.correction.tokens import TokenBatch

# Prefix of the sums of exact correction, f = k.
EXACT = "exact/"
TABLE = "by_confidence"
# The columns of the table, a row a confidence bin: sums over its tokens.
COLUMNS = ("tokens", "bias", "abs_bias", "excess", "excess_squared", "score_bias", "score_abs_bias", "score", "score_squared")
BINS = len(CONFIDENCE_NAMES)


def bias_sums(tokens: TokenBatch, weights: Tensor) -> MetricSums:
    """The table of a method: float64 ``[5, columns]``.

    Args:
        tokens: the batch.
        weights: float64, the batch's shape; f, 0 on rejected tokens, not read on invalid ones.
    """
    lost, excess, room = tokens.ratio - weights, weights - 1, tokens.room
    scored = room * weights
    values = {
        "tokens": torch.ones_like(lost),
        "bias": lost,
        "abs_bias": lost.abs(),
        "excess": excess,
        "excess_squared": excess.square(),
        "score_bias": room * lost,
        "score_abs_bias": room * lost.abs(),
        "score": scored,
        "score_squared": scored.square(),
    }
    confidence = confidence_bin(room)
    bins = [tokens.valid & (confidence == number) for number in range(BINS)]
    rows = [torch.stack([torch.where(chosen, values[name], 0).sum() for name in COLUMNS]) for chosen in bins]
    return MetricSums(tables={TABLE: torch.stack(rows)})


def bias_metrics(sums: MetricSums) -> dict[str, float]:
    """``bias``, ``abs_bias``, ``variance`` and their ``score_`` forms, whole and (``NAME/p_...``) in parts; {} without a table.

    Args:
        sums: of :func:`bias_sums`, without a prefix.
    """
    if TABLE not in sums.tables:
        return {}
    column = dict(zip(COLUMNS, sums.tables[TABLE].cpu().numpy().T, strict=True))
    count = max(1.0, column["tokens"].sum())
    parts = {name: column[name] / count for name in ("bias", "abs_bias", "score_bias", "score_abs_bias")}
    parts["variance"] = _variance_parts(column["excess"], column["excess_squared"], column["tokens"], count)
    parts["score_variance"] = _variance_parts(column["score"], column["score_squared"], column["tokens"], count)
    metrics = {name: float(values.sum()) for name, values in parts.items()}
    for name in ("bias", "abs_bias", "variance"):
        metrics |= {f"{name}/{label}": float(value) for label, value in zip(CONFIDENCE_NAMES, parts[name], strict=True)}
    return metrics


def _variance_parts(first: np.ndarray, second: np.ndarray, tokens: np.ndarray, count: float) -> np.ndarray:
    """Each bin's part of E[(x - E x)^2], from its sums of x and x^2."""
    middle = first.sum() / count
    return np.maximum(0, second - 2 * middle * first + middle**2 * tokens) / count
