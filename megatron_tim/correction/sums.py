"""Metrics as sums and maxima, so that the value over many micro-batches and ranks is the single-process one."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed
from torch import Tensor


@dataclass(frozen=True)
class MetricSums:
    """Sums and maxima by name (float64 scalars on the inputs' device); a minimum is the maximum of the negative.

    Nothing is copied to the host until :meth:`to_floats`, so that adding them up never waits for the GPU.
    """

    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)

    def __add__(self, other: MetricSums) -> MetricSums:
        """The metrics of both sets of tokens together; a name that only one side has keeps its value."""
        sums = {**self.sums, **other.sums}
        maxima = {**self.maxima, **other.maxima}
        for name in self.sums.keys() & other.sums.keys():
            sums[name] = self.sums[name] + other.sums[name]
        for name in self.maxima.keys() & other.maxima.keys():
            maxima[name] = torch.maximum(self.maxima[name], other.maxima[name])
        return MetricSums(sums, maxima)

    def all_reduce(self, group: torch.distributed.ProcessGroup | None = None) -> MetricSums:
        """The sums over all ranks of ``group``, in two collectives; every rank must hold the same names."""
        return MetricSums(
            _reduced(self.sums, torch.distributed.ReduceOp.SUM, group),
            _reduced(self.maxima, torch.distributed.ReduceOp.MAX, group),
        )

    def to_tensors(self) -> dict[str, Tensor]:
        """One flat dictionary, to be sent elsewhere; :meth:`from_tensors` is its inverse."""
        kinds = {"sums": self.sums, "maxima": self.maxima}
        return {f"{kind}:{name}": value for kind, values in kinds.items() for name, value in values.items()}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> MetricSums:
        """The inverse of :meth:`to_tensors`."""
        kinds: dict[str, dict[str, Tensor]] = {"sums": {}, "maxima": {}}
        for key, value in tensors.items():
            kind, name = key.split(":", 1)
            kinds[kind][name] = value
        return cls(**kinds)

    def to_floats(self) -> dict[str, float]:
        """Sums and maxima by name, in one transfer to the host."""
        values = {**self.sums, **self.maxima}
        return dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True)) if values else {}


def _reduced(values: dict[str, Tensor], op: torch.distributed.ReduceOp, group: torch.distributed.ProcessGroup | None) -> dict[str, Tensor]:
    if not values:
        return {}
    names = sorted(values)  # the order of insertion may differ between ranks
    packed = torch.stack([values[name] for name in names])
    torch.distributed.all_reduce(packed, op=op, group=group)
    return dict(zip(names, packed.unbind(), strict=True))


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
