"""``lam: auto``: the lam of CIS that balances bias and variance for the displacement that was measured.

What is minimised over lam is the mean squared error of the mean corrected weight y = g f, f = min(k, 1 + lam r) with
r = max(1 - p, kappa), as an estimate of E[g k]:

    error(lam) = E[g (k - f)]^2 + Var(g f) / n_eff

with g = 1 (the weight itself) or g = 1 - p (a proxy of the norm of the token's score), over the valid tokens. A token is
capped exactly where lam < l = (k - 1) / r, so that sums over bins of l give both terms exactly at the edges of the bins,
:data:`LAM_GRID`. Tokens of a sequence resemble each other; n_eff = Var(y) / Var(mean of y) is measured with the variance
of the mean taken between sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from megatron_tim.correction.settings import Settings
from megatron_tim.correction.sums import MetricSums, total
from megatron_tim.correction.tokens import TokenBatch

if TYPE_CHECKING:
    from megatron_tim.correction.config import CorrectionConfig

PREFIX = "lam/"
SKETCH = f"{PREFIX}sketch"
LAM_GRID = np.geomspace(0.01, 100, 194)
"""The values of lam that are compared, 5 % apart."""
COLUMNS = ("g_excess", "g_room", "g2_square", "g2_room", "g2_room_squared")


class AutoLamConfig(Settings):
    """How lam = auto is chosen. The first step takes ``start``; each later one may move by ``max_factor``."""

    weighting: Literal["weight", "score"] = Field(
        "weight", description="Whose error is minimised: of the mean weight, or of the mean of (1 - p) times the weight."
    )
    start: float = Field(2.3, gt=0, description="lam before anything is measured.")
    low: float = Field(0.1, ge=float(LAM_GRID[0]), description="Smallest lam.")
    high: float = Field(20.0, le=float(LAM_GRID[-1]), description="Largest lam.")
    max_factor: float = Field(1.2, gt=1, description="Most that lam is multiplied or divided by from one step to the next.")
    decay: float = Field(0.9, ge=0, lt=1, description="Weight of the past in the running sketch, a step.")
    measure: bool = Field(False, description="Measure it beside a fixed lam too, and log the lam that would be best.")

    @model_validator(mode="after")
    def _start_is_inside(self) -> AutoLamConfig:
        if not self.low <= self.start <= self.high:
            raise ValueError(f"start = {self.start:g} is not between low = {self.low:g} and high = {self.high:g}")
        return self


def lam_sums(tokens: TokenBatch, weights: Tensor, kappa: float, weighting: str) -> MetricSums:
    """The sketch ``[len(LAM_GRID) + 1, columns]`` and the sums behind n_eff.

    Args:
        tokens: the batch.
        weights: float64, the batch's shape; f under the lam in use.
        kappa: of the cap.
        weighting: ``weight`` or ``score``, as in :class:`AutoLamConfig`.
    """
    scale = tokens.valid.double() if weighting == "weight" else torch.where(tokens.valid, tokens.room, 0)
    room, excess = tokens.room.clamp(min=kappa), tokens.excess
    values = torch.stack(
        [
            scale * excess,
            scale * room,
            scale.square() * excess * (excess + 2),
            scale.square() * room,
            (scale * room).square(),
        ],
        dim=-1,
    )
    bins = torch.bucketize(excess / room, torch.from_numpy(LAM_GRID).to(excess.device)).reshape(-1)
    sketch = values.new_zeros(len(LAM_GRID) + 1, len(COLUMNS)).index_add_(0, bins, values.reshape(-1, len(COLUMNS)))
    return MetricSums(_between_sequences(tokens, scale, weights), {}, {SKETCH: sketch})


def _between_sequences(tokens: TokenBatch, scale: Tensor, weights: Tensor) -> dict[str, Tensor]:
    scored = torch.where(tokens.valid, scale * weights, 0)
    of_sequence, length = tokens.sequence_sum(scored), tokens.length
    sums = {
        "tokens": tokens.valid,
        "scale": scale,
        "scale_squared": scale.square(),
        "scored": scored,
        "scored_squared": scored.square(),
        "sequence_squared": of_sequence.square(),
        "sequence_length": of_sequence * length,
        "length_squared": length.square(),
    }
    return {PREFIX + name: total(value) for name, value in sums.items()}


def lam_errors(sums: MetricSums, n_eff: float) -> np.ndarray:
    """error(lam) at every lam of :data:`LAM_GRID`, float64.

    Args:
        sums: of :func:`lam_sums`.
        n_eff: how many independent tokens the mean stands for.
    """
    value = sums.below(PREFIX).to_floats()
    column = dict(zip(COLUMNS, sums.tables[SKETCH].cpu().numpy().T, strict=True))
    count = max(1.0, value["tokens"])

    def capped(name: str) -> np.ndarray:  # bins above each grid value
        return column[name].sum() - np.cumsum(column[name])[:-1]

    bias = (capped("g_excess") - LAM_GRID * capped("g_room")) / count
    first = (value["scale"] + column["g_excess"].sum() - capped("g_excess") + LAM_GRID * capped("g_room")) / count
    uncapped_square = column["g2_square"].sum() - capped("g2_square")
    capped_square = 2 * LAM_GRID * capped("g2_room") + LAM_GRID**2 * capped("g2_room_squared")
    second = (value["scale_squared"] + uncapped_square + capped_square) / count
    return bias**2 + np.maximum(0, second - first**2) / n_eff


def effective_tokens(sums: MetricSums) -> float:
    """n_eff: between 1 and the number of tokens; that number where nothing varies."""
    value = sums.below(PREFIX).to_floats()
    count = value["tokens"]
    if count == 0:
        return 1.0
    middle = value["scored"] / count
    within = value["scored_squared"] / count - middle**2
    between = value["sequence_squared"] - 2 * middle * value["sequence_length"] + middle**2 * value["length_squared"]
    if within <= 0 or between <= 0:
        return count
    return float(np.clip(within * count**2 / between, 1, count))


def best_lam(sums: MetricSums, n_eff: float, low: float = float(LAM_GRID[0]), high: float = float(LAM_GRID[-1])) -> float:
    """The lam of :data:`LAM_GRID` within [low, high] with the smallest error; the smallest such lam on a tie."""
    allowed = (low <= LAM_GRID) & (high >= LAM_GRID)
    return float(LAM_GRID[allowed][np.argmin(lam_errors(sums, n_eff)[allowed])])


@dataclass
class AutoLam:
    """The running choice of lam: ask :meth:`resolve` before a batch, tell :meth:`update` its sums after it.

    Attributes:
        config: the bounds.
        lam: what the next batch uses.
        sums: the running sketch, decayed at every step.
    """

    config: AutoLamConfig
    lam: float = 0.0
    sums: MetricSums = field(default_factory=MetricSums)

    def __post_init__(self) -> None:
        self.lam = self.lam or self.config.start

    def resolve(self, correction: CorrectionConfig) -> CorrectionConfig:
        """``correction`` with lam as a number, and with what :meth:`update` needs measured."""
        measured = correction.auto_lam.model_copy(update={"measure": True})
        return correction.model_copy(update={"lam": self.lam, "auto_lam": measured})

    def update(self, sums: MetricSums) -> None:
        """Takes in the sums of a batch, combined over ranks, and moves lam; a batch without tokens moves nothing."""
        batch = sums.below(PREFIX).with_prefix(PREFIX)
        if not batch.to_floats().get(f"{PREFIX}tokens"):
            return
        self.sums = self.sums.scaled(self.config.decay) + batch
        best = best_lam(self.sums, effective_tokens(batch), self.config.low, self.config.high)
        step = float(np.clip(best / self.lam, 1 / self.config.max_factor, self.config.max_factor))
        self.lam = float(np.clip(self.lam * step, self.config.low, self.config.high))

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold for the run to go on as if never interrupted: numbers and lists of them."""
        return {"lam": self.lam, "sums": {name: value.tolist() for name, value in self.sums.to_tensors().items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what :meth:`state_dict` gave."""
        self.lam = state["lam"]
        tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in state["sums"].items()}
        self.sums = MetricSums.from_tensors(tensors)


def lam_metrics(sums: MetricSums) -> dict[str, float]:
    """``lam/n_eff``, ``lam/best`` (over the whole grid, of this batch alone) and ``lam/error`` there; {} if not measured."""
    if SKETCH not in sums.tables:
        return {}
    n_eff = effective_tokens(sums)
    return {f"{PREFIX}n_eff": n_eff, f"{PREFIX}best": best_lam(sums, n_eff), f"{PREFIX}error": float(lam_errors(sums, n_eff).min())}
