"""Metrics as sums, maxima and tables, so that the value over many micro-batches and ranks is the single-process one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed
from torch import Tensor


@dataclass(frozen=True)
class MetricSums:
    """Sums and maxima (float64 scalars) and tables (float64 of any shape, added element by element) by name.

    A minimum is the maximum of the negative; a histogram is a table. Nothing is copied to the host until
    :meth:`to_floats`, so that adding them up never waits for the GPU.
    """

    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)
    tables: dict[str, Tensor] = field(default_factory=dict)

    def __add__(self, other: MetricSums) -> MetricSums:
        """The metrics of both sets of tokens together; a name that only one side has keeps its value."""
        return MetricSums(
            _merged(self.sums, other.sums, torch.add),
            _merged(self.maxima, other.maxima, torch.maximum),
            _merged(self.tables, other.tables, torch.add),
        )

    def all_reduce(self, group: torch.distributed.ProcessGroup | None = None) -> MetricSums:
        """The sums over all ranks of ``group``, in two collectives; every rank must hold the same names."""
        added = _reduced(self.sums | {f"table:{name}": table for name, table in self.tables.items()}, torch.distributed.ReduceOp.SUM, group)
        return MetricSums(
            {name: added[name] for name in self.sums},
            _reduced(self.maxima, torch.distributed.ReduceOp.MAX, group),
            {name: added[f"table:{name}"] for name in self.tables},
        )

    def scaled(self, factor: float) -> MetricSums:
        """Sums and tables times ``factor``, maxima as they are."""
        sums, tables = ({name: factor * value for name, value in kind.items()} for kind in (self.sums, self.tables))
        return MetricSums(sums, self.maxima, tables)

    def with_prefix(self, prefix: str) -> MetricSums:
        """The same under names that begin with ``prefix``."""
        return MetricSums(*({prefix + name: value for name, value in kind.items()} for kind in (self.sums, self.maxima, self.tables)))

    def below(self, prefix: str) -> MetricSums:
        """What is under ``prefix``, under names without it."""
        return MetricSums(
            *(
                {name.removeprefix(prefix): value for name, value in kind.items() if name.startswith(prefix)}
                for kind in (self.sums, self.maxima, self.tables)
            )
        )

    def to_tensors(self) -> dict[str, Tensor]:
        """One flat dictionary, to be sent elsewhere; :meth:`from_tensors` is its inverse."""
        kinds = {"sums": self.sums, "maxima": self.maxima, "tables": self.tables}
        return {f"{kind}:{name}": value for kind, values in kinds.items() for name, value in values.items()}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> MetricSums:
        """The inverse of :meth:`to_tensors`."""
        kinds: dict[str, dict[str, Tensor]] = {"sums": {}, "maxima": {}, "tables": {}}
        for key, value in tensors.items():
            kind, name = key.split(":", 1)
            kinds[kind][name] = value
        return cls(**kinds)

    def to_floats(self) -> dict[str, float]:
        """Sums and maxima by name, in one transfer to the host."""
        values = {**self.sums, **self.maxima}
        return dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True)) if values else {}


def _merged(left: dict[str, Tensor], right: dict[str, Tensor], combine: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Tensor]:
    return {**left, **right, **{name: combine(left[name], right[name]) for name in left if name in right}}


def _reduced(values: dict[str, Tensor], op: torch.distributed.ReduceOp, group: torch.distributed.ProcessGroup | None) -> dict[str, Tensor]:
    if not values:
        return {}
    names = sorted(values)  # the order of insertion may differ between ranks
    packed = torch.cat([values[name].reshape(-1) for name in names])
    torch.distributed.all_reduce(packed, op=op, group=group)
    parts = packed.split([values[name].numel() for name in names])
    return {name: part.view(values[name].shape) for name, part in zip(names, parts, strict=True)}


def total(values: Tensor) -> Tensor:
    """The sum of all elements as a float64 scalar."""
    return values.sum(dtype=torch.float64)


def largest(values: Tensor, where: Tensor) -> Tensor:
    """The largest element where ``where`` holds, as a float64 scalar; -inf when there is none."""
    chosen = torch.where(where, values.double(), -torch.inf)
    return chosen.max() if chosen.numel() else chosen.new_tensor(-torch.inf)


def mean(amount: float, count: float) -> float:
    """amount / count, and 0 for no elements at all."""
    return amount / count if count else 0.0
