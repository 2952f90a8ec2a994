"""Greedy exact match: the share of problems whose one greedy response ends in the right number."""

from __future__ import annotations

from statistics import fmean

from megatron_tim.evaluation.answers import exact_match
from megatron_tim.rollout.trajectory import Trajectory
from megatron_tim.training.data import Problem
from megatron_tim.training.text import TextCodec


def exact_match_share(trajectories: list[Trajectory], problems: list[Problem], codec: TextCodec) -> float:
    """``trajectories[i]`` is the response to ``problems[i]``."""
    pairs = zip(trajectories, problems, strict=True)
    return fmean(exact_match(codec.text(t.response_ids), problem.final) for t, problem in pairs)
