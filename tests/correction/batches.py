"""Ragged batches for the tests, in both layouts, with rubbish wherever the mask is False."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_tim.correction import LossConfig

# Reproducible, and no deadline: the first call of a torch operator can take long.
examples = settings(deadline=None, derandomize=True, max_examples=60)

RUBBISH = (math.nan, math.inf, -math.inf, 7.0)
log_probability = st.one_of(st.floats(-12, -0.1), st.floats(-2, -1e-7), st.floats(-1e-3, 0))


@dataclass
class Token:
    train: float
    rollout: float
    sampled: bool
    current: float = 0.0
    advantage: float = 0.0


@st.composite
def tokens(draw: st.DrawFn, broken: bool = True) -> Token:
    """One token; with ``broken``, sometimes a sampled one whose log-prob is not finite."""
    train = draw(log_probability)
    rollout = draw(st.one_of(log_probability, st.floats(0.3, 3).map(lambda factor: factor * train)))
    current = train * draw(st.floats(0.4, 2))
    token = Token(train, rollout, draw(st.integers(0, 4)) > 0, current, draw(st.floats(-3, 3)))
    if broken and draw(st.integers(0, 9)) == 0:
        setattr(token, draw(st.sampled_from(["train", "rollout"])), draw(st.sampled_from([math.nan, math.inf, -math.inf])))
    if not token.sampled:
        token.train, token.rollout = draw(st.sampled_from(RUBBISH)), draw(st.sampled_from(RUBBISH))
    return token


def sequences(broken: bool = True) -> st.SearchStrategy[list[list[Token]]]:
    return st.lists(st.lists(tokens(broken), max_size=7), min_size=1, max_size=5)


def padded(rows: list[list[Token]], field: str, dtype: torch.dtype = torch.float64) -> Tensor:
    """``[B, T]`` of a field, one column wider than the longest row and with rubbish on the padding."""
    width = max(map(len, rows)) + 1
    values = [[getattr(token, field) for token in row] + [RUBBISH[i % 4] for i in range(width - len(row))] for row in rows]
    return torch.tensor(values, dtype=dtype)


def padded_mask(rows: list[list[Token]]) -> Tensor:
    width = max(map(len, rows)) + 1
    return torch.tensor([[token.sampled for token in row] + [False] * (width - len(row)) for row in rows])


def packed(rows: list[list[Token]], field: str, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor([getattr(token, field) for row in rows for token in row], dtype=dtype)


def packed_mask(rows: list[list[Token]]) -> Tensor:
    return torch.tensor([token.sampled for row in rows for token in row], dtype=torch.bool)


def cu_seqlens(rows: list[list[Token]]) -> Tensor:
    return torch.tensor([0] + [len(row) for row in rows], dtype=torch.int32).cumsum(0, dtype=torch.int32)


@st.composite
def losses(draw: st.DrawFn) -> LossConfig:
    """Any policy loss with its own or with asymmetric clips, with and without a dual clip."""
    name = draw(st.sampled_from(["reinforce", "ppo", "gspo", "cispo"]))
    clips = {"clip_low": draw(st.none() | st.floats(0, 0.5)), "clip_high": draw(st.none() | st.floats(0, 0.9))}
    dual_clip = draw(st.none() | st.floats(1.1, 4)) if name in ("ppo", "gspo") else None
    return LossConfig(name=name, dual_clip=dual_clip, **clips)


def near_kink(log_ratio: float, advantage: float, loss: LossConfig) -> bool:
    """Whether rounding, or a convention, decides the gradient: at a bound of r, and without an advantage."""
    if loss.name not in ("ppo", "gspo"):
        return False
    low, high = loss.clips
    bounds = [1 - low, 1 + high, loss.dual_clip or 0]
    return advantage == 0 or any(abs(math.exp(min(log_ratio, 20)) - bound) < 1e-9 for bound in bounds)
