"""Histograms that add up over micro-batches and ranks, and the quantiles, deviations and rank correlations they hold.

A histogram over ascending ``edges`` has ``len(edges) + 1`` bins: bin i counts values in (edges[i-1], edges[i]], the
first and the last one what lies outside.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

# Width of a displacement bin within [-1, 1], one of them around 0: a quantile there is off by less.
LINEAR_STEP = 0.002


def _symmetric(linear: np.ndarray, outer: np.ndarray) -> np.ndarray:
    return np.concatenate([-outer[::-1], linear, outer])


# Linear within [-1, 1], then 4 % a bin up to 1,000.
_LINEAR_EDGES = LINEAR_STEP * (np.arange(-500, 502) - 0.5)
DISPLACEMENT_EDGES = _symmetric(_LINEAR_EDGES, np.geomspace(_LINEAR_EDGES[-1], 1000, 177)[1:])
# Of C(r): from 1e-6 to 1e6, 10 % a bin, and one bin around 0.
SMALLEST_CONTRIBUTION = 1e-6
CONTRIBUTION_EDGES = _symmetric(np.empty(0), np.geomspace(SMALLEST_CONTRIBUTION, 1e6, 291))

# The confidence bins of the CIS paper, by the train probability p.
CONFIDENCE_NAMES = ("p_below_0.5", "p_0.5_0.9", "p_0.9_0.99", "p_0.99_0.999", "p_above_0.999")
CONFIDENCE_ROOMS = (0.5, 0.1, 0.01, 0.001)
"""1 - p at the bounds between them; a token with exactly that much room belongs to the more confident side."""

# Finer bins of 1 - p, each inside one confidence bin, for rank correlations.
ROOM_EDGES = np.concatenate(
    [np.geomspace(1e-7, 1e-3, 9), *(np.linspace(low, high, 9)[1:] for low, high in ((1e-3, 1e-2), (1e-2, 0.1), (0.1, 0.5), (0.5, 1.0)))]
)[:-1]
_ROOM_MIDDLES = np.concatenate([[0.0], (ROOM_EDGES[1:] + ROOM_EDGES[:-1]) / 2, [1.0]])
CONFIDENCE_OF_ROOM = (_ROOM_MIDDLES[:, None] < np.array(CONFIDENCE_ROOMS)).sum(axis=1)
"""The confidence bin of each bin of ``ROOM_EDGES``."""


def confidence_bin(room: Tensor) -> Tensor:
    """int64: the number of the confidence bin of each 1 - p, 0 for p < 0.5 up to 4 for p >= 0.999."""
    return sum((room <= bound).long() for bound in CONFIDENCE_ROOMS)


def histogram(values: Tensor, edges: np.ndarray, where: Tensor) -> Tensor:
    """float64 ``[len(edges) + 1]``: how many of ``values`` are in each bin, where ``where`` holds."""
    bins = _bins(values, edges)
    return _counts(bins, where, len(edges) + 1)


def histogram_2d(rows: Tensor, row_edges: np.ndarray, columns: Tensor, column_edges: np.ndarray, where: Tensor) -> Tensor:
    """float64 ``[len(row_edges) + 1, len(column_edges) + 1]`` of pairs of values."""
    width = len(column_edges) + 1
    cells = _bins(rows, row_edges) * width + _bins(columns, column_edges)
    return _counts(cells, where, (len(row_edges) + 1) * width).view(-1, width)


def _bins(values: Tensor, edges: np.ndarray) -> Tensor:
    return torch.bucketize(values, torch.from_numpy(edges).to(values.device))


def _counts(bins: Tensor, where: Tensor, size: int) -> Tensor:
    # Integers add up to the same in any order, so this is deterministic on every device.
    counts = torch.zeros(size, dtype=torch.int64, device=bins.device)
    return counts.scatter_add_(0, bins.reshape(-1), where.reshape(-1).long()).double()


def quantile(counts: np.ndarray, edges: np.ndarray, share: float) -> float:
    """The value below which ``share`` of the counts lie, interpolated in its bin; 0 for no counts.

    In the first and the last bin there is nothing to interpolate between, and the outermost edge is returned.
    """
    total = counts.sum()
    return float(np.interp(share * total, np.cumsum(counts)[:-1], edges)) if total else 0.0


def median_absolute_deviation(counts: np.ndarray, edges: np.ndarray) -> float:
    """1.4826 times the median of |x - median|, the standard deviation of a normal distribution; 0 for no counts."""
    total = counts.sum()
    if not total:
        return 0.0
    middle, below = quantile(counts, edges, 0.5), np.cumsum(counts)[:-1]
    small, large = 0.0, float(edges[-1] - edges[0])
    for _ in range(60):  # halves the interval until it is far below the width of a bin
        radius = (small + large) / 2
        inside = np.interp(middle + radius, edges, below) - np.interp(middle - radius, edges, below)
        small, large = (radius, large) if inside < total / 2 else (small, radius)
    return 1.4826 * large


def spearman(table: np.ndarray) -> float:
    """The rank correlation of the two variables of a 2-D histogram, with mid-ranks inside a bin; 0 where either is constant."""
    total = table.sum()
    rows, columns = _centred_mid_ranks(table.sum(axis=1)), _centred_mid_ranks(table.sum(axis=0))
    row_variance, column_variance = table.sum(axis=1) @ rows**2, table.sum(axis=0) @ columns**2
    if not total or not row_variance or not column_variance:
        return 0.0
    return float(rows @ table @ columns / math.sqrt(row_variance * column_variance))


def _centred_mid_ranks(counts: np.ndarray) -> np.ndarray:
    return np.cumsum(counts) - counts / 2 - counts.sum() / 2
