"""How far the engines' log-odds lie apart, as a distribution: what a mean of k cannot show.

Under ``displacement/``, with eps = logit(p) - logit(q), of the valid tokens whose 1 - p and 1 - q are not rounding:

- ``median``, ``mad`` (times 1.4826), ``q05``, ``q95`` and ``tokens``: of all, and (``NAME/p_...``) in five bins of p;
- ``spearman_confidence``: rank correlation of eps and p. Near 0, confidence tells nothing about the size of eps, and
  the tail of k comes from the room 1 - p alone (CIS paper, arXiv 2609.32444);
- ``raw_moment_1|2``: E[e^(a eps)]; ``weighted_moment_1|2``: E[((1 - p) e^eps)^a], each e^eps at most exp(20);
- ``left_out_share``: of the valid tokens, those below the cut;
- ``variance_above_1``, ``variance_below_1``: shares of Var(k), over all valid tokens, from those with k > 1 and k <= 1.
"""

from __future__ import annotations

import numpy as np
import torch

from megatron_tim.correction.displacement import LOG_RATIO_BOUND, one_minus_p
from megatron_tim.correction.sketch import (
    CONFIDENCE_NAMES,
    CONFIDENCE_OF_ROOM,
    DISPLACEMENT_EDGES,
    ROOM_EDGES,
    histogram_2d,
    median_absolute_deviation,
    quantile,
    spearman,
)
from megatron_tim.correction.sums import MetricSums, mean, total
from megatron_tim.correction.tokens import TokenBatch

PREFIX = "displacement/"
HISTOGRAM = f"{PREFIX}histogram"
"""Counts by 1 - p (rows, ``ROOM_EDGES``) and eps (columns, ``DISPLACEMENT_EDGES``)."""


def displacement_sums(tokens: TokenBatch, cut: float) -> MetricSums:
    """The sums and the histogram behind :func:`displacement_metrics`.

    Args:
        tokens: the batch.
        cut: eps is left out where 1 - p or 1 - q is below it.
    """
    rollout_room = one_minus_p(tokens.rollout)
    counted = tokens.valid & (torch.minimum(tokens.room, rollout_room) >= max(cut, torch.finfo(torch.float64).tiny))
    eps = torch.where(counted, tokens.displacement, 0)
    growth = torch.where(counted, eps.clamp(max=LOG_RATIO_BOUND).exp(), 0)
    weighted = growth * tokens.room
    above = tokens.excess > 0
    excess_above = torch.where(above, tokens.excess, 0)
    sums = {
        "valid": tokens.valid,
        "counted": counted,
        "raw_moment_1": growth,
        "raw_moment_2": growth.square(),
        "weighted_moment_1": weighted,
        "weighted_moment_2": weighted.square(),
        "above": above,
        "excess": tokens.excess,
        "excess_squared": tokens.excess.square(),
        "excess_above": excess_above,
        "excess_above_squared": excess_above.square(),
    }
    counts = histogram_2d(tokens.room, ROOM_EDGES, eps, DISPLACEMENT_EDGES, counted)
    return MetricSums({PREFIX + name: total(values) for name, values in sums.items()}, {}, {HISTOGRAM: counts})


def displacement_metrics(sums: MetricSums) -> dict[str, float]:
    """The metrics listed at the top of this file; {} where ``sums`` holds none."""
    if HISTOGRAM not in sums.tables:
        return {}
    value, table = sums.below(PREFIX).to_floats(), sums.tables[HISTOGRAM].cpu().numpy()
    metrics = _distribution(table.sum(axis=0))
    for number, label in enumerate(CONFIDENCE_NAMES):
        parts = _distribution(table[number == CONFIDENCE_OF_ROOM].sum(axis=0))
        metrics |= {f"{name}/{label}": part for name, part in parts.items()}
    # Rows are ordered by 1 - p, so that their ranks run against confidence.
    metrics["spearman_confidence"] = -spearman(table)
    for name in ("raw_moment_1", "raw_moment_2", "weighted_moment_1", "weighted_moment_2"):
        metrics[name] = mean(value[name], value["counted"])
    metrics["left_out_share"] = mean(value["valid"] - value["counted"], value["valid"])
    metrics |= _variance_by_side(value)
    return {PREFIX + name: number for name, number in metrics.items()}


def _distribution(counts: np.ndarray) -> dict[str, float]:
    return {
        "tokens": float(counts.sum()),
        "median": quantile(counts, DISPLACEMENT_EDGES, 0.5),
        "mad": median_absolute_deviation(counts, DISPLACEMENT_EDGES),
        "q05": quantile(counts, DISPLACEMENT_EDGES, 0.05),
        "q95": quantile(counts, DISPLACEMENT_EDGES, 0.95),
    }


def _variance_by_side(value: dict[str, float]) -> dict[str, float]:
    middle = mean(value["excess"], value["valid"])

    def squares(second: float, first: float, count: float) -> float:
        return max(0.0, second - 2 * middle * first + middle**2 * count)

    whole = squares(value["excess_squared"], value["excess"], value["valid"])
    above = squares(value["excess_above_squared"], value["excess_above"], value["above"])
    return {"variance_above_1": mean(above, whole), "variance_below_1": mean(whole - above, whole)}
