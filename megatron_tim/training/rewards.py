"""The reward of a response: 1 for the right final answer, 0 otherwise; and what a rollout batch looks like."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable
from statistics import fmean

from megatron_tim.evaluation.answers import exact_match
from megatron_tim.rollout.trajectory import Trajectory
from megatron_tim.training import metric_names as names
from megatron_tim.training.data import Problem
from megatron_tim.training.text import TextCodec


def scored(trajectories: list[Trajectory], problems: Iterable[Problem], codec: TextCodec) -> list[Trajectory]:
    """The trajectories, answers to ``problems``, with their rewards."""
    finals = {problem.index: problem.final for problem in problems}
    return [dataclasses.replace(t, reward=float(exact_match(codec.text(t.response_ids), finals[t.prompt_index]))) for t in trajectories]


def rollout_metrics(trajectories: list[Trajectory]) -> dict[str, float]:
    """Rewards and lengths of a scored batch.

    ``rollout/solved_groups`` and ``rollout/unsolved_groups`` are the shares of prompts whose samples
    were all right or all wrong: they teach nothing.
    """
    groups = defaultdict(list)
    for t in trajectories:
        groups[t.group].append(t.reward)
    lengths = [t.response_ids.size for t in trajectories]
    return {
        names.REWARD: fmean(t.reward for t in trajectories),
        "rollout/solved_groups": fmean(min(rewards) == 1 for rewards in groups.values()),
        "rollout/unsolved_groups": fmean(max(rewards) == 0 for rewards in groups.values()),
        "rollout/tokens": float(sum(lengths)),
        "response_length/mean": fmean(lengths),
        "response_length/max": float(max(lengths)),
        "response_length/clip_ratio": fmean(t.finish_reason == "length" for t in trajectories),
    }
