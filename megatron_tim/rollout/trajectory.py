"""One sampled response as the engine returned it: the record that every later stage reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class WeightVersionSpan(NamedTuple):
    """Response tokens ``[start, end)`` were sampled with weights ``version``."""

    version: str
    start: int
    end: int


_ARRAYS = {"prompt_ids": np.int32, "response_ids": np.int32, "response_mask": np.bool_, "rollout_logprobs": np.float32}


@dataclass(frozen=True, eq=False)
class Trajectory:
    """A prompt, one sampled response, and what the rollout engine recorded while sampling it.

    P is the number of prompt tokens, R the number of response tokens. Rewards are added with
    ``dataclasses.replace``. Equality is identity: compare the fields that matter.

    Raises:
        ValueError: a field has a wrong type, shape or value; the message starts with its name.
    """

    prompt_index: int
    """Row of the data file that the prompt came from."""
    group: int
    """Samples of one prompt share it: the group of the advantage."""
    prompt_ids: np.ndarray
    """int32 [P], P >= 1."""
    response_ids: np.ndarray
    """int32 [R], R >= 1: the engine's own ids, never re-tokenised."""
    response_mask: np.ndarray
    """bool [R]; False where the environment, not the policy, wrote the token."""
    rollout_logprobs: np.ndarray
    """float32 [R], natural logarithm, unaltered."""
    logprob_temperature: float
    """Temperature that ``rollout_logprobs`` refer to."""
    routed_experts: np.ndarray | None
    """uint8 or uint16 [P+R-1, moe_layers, topk]; row i belongs to input token i, so the last sampled token has none."""
    weight_versions: tuple[WeightVersionSpan, ...]
    """Contiguous spans that cover [0, R)."""
    finish_reason: str
    """``stop``, ``length`` or ``abort``."""
    rid: str
    """The engine's request id."""
    engine: str
    """Name, version and arithmetic of the engine."""
    reward: float | None = None

    def __post_init__(self) -> None:
        for name, dtype in _ARRAYS.items():
            array = getattr(self, name)
            if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1 or array.size == 0:
                raise ValueError(f"{name} must be a non-empty {np.dtype(dtype).name} array of one dimension, found {_describe(array)}")
        for name in ("response_mask", "rollout_logprobs"):
            if getattr(self, name).size != self.response_ids.size:
                raise ValueError(f"{name} has {getattr(self, name).size} entries for {self.response_ids.size} response_ids")
        for name in ("prompt_ids", "response_ids"):
            if getattr(self, name).min() < 0:
                raise ValueError(f"{name} holds a negative token id: {getattr(self, name).min()}")
        if not self.logprob_temperature > 0:
            raise ValueError(f"logprob_temperature must be positive, found {self.logprob_temperature}")
        self._check_routes()
        self._check_versions()

    def _check_routes(self) -> None:
        routes = self.routed_experts
        if routes is None:
            return
        if not isinstance(routes, np.ndarray) or routes.dtype not in (np.uint8, np.uint16) or routes.ndim != 3:
            raise ValueError(f"routed_experts must be a uint8 or uint16 array of three dimensions, found {_describe(routes)}")
        rows = self.prompt_ids.size + self.response_ids.size - 1
        if routes.shape[0] != rows:
            raise ValueError(f"routed_experts has {routes.shape[0]} rows, prompt and response need {rows}")

    def _check_versions(self) -> None:
        position = 0
        for span in self.weight_versions:
            if span.start != position or span.end <= span.start:
                raise ValueError(f"weight_versions {list(self.weight_versions)} are not contiguous from token 0")
            position = span.end
        if position != self.response_ids.size:
            raise ValueError(f"weight_versions cover {position} of {self.response_ids.size} response tokens")


def _describe(value: object) -> str:
    return f"{value.dtype.name} {list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
