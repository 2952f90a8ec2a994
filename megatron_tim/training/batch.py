"""Trajectories turned into the tensors of a step: samples, advantages, weights, minibatches."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from megatron_tim.config import AdvantageConfig
from megatron_tim.correction import ADVANTAGES, Correction, CorrectionConfig, correct
from megatron_tim.megatron.packing import Sample
from megatron_tim.rollout.trajectory import Trajectory


@dataclasses.dataclass(frozen=True)
class RolloutBatch:
    """A rollout batch as packed tensors over all response tokens, trajectory by trajectory."""

    trajectories: list[Trajectory]
    rollout_logprobs: Tensor
    """float32 ``[N]``."""
    advantages: Tensor
    """float32 ``[N]``: each token has its trajectory's."""
    mask: Tensor
    """bool ``[N]``: the tokens that the policy sampled."""
    cu_seqlens: Tensor
    """int64 ``[trajectories + 1]``."""

    @classmethod
    def from_trajectories(cls, trajectories: list[Trajectory], config: AdvantageConfig) -> RolloutBatch:
        lengths = torch.tensor([t.response_ids.size for t in trajectories])
        rewards = torch.tensor([t.reward for t in trajectories], dtype=torch.float32)
        groups = torch.tensor([t.group for t in trajectories])
        return cls(
            trajectories=trajectories,
            rollout_logprobs=torch.from_numpy(np.concatenate([t.rollout_logprobs for t in trajectories])),
            advantages=ADVANTAGES[config.method](rewards, groups).float().repeat_interleave(lengths),
            mask=torch.from_numpy(np.concatenate([t.response_mask for t in trajectories])),
            cu_seqlens=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        )

    def samples(self, **fields: Tensor) -> list[Sample]:
        """One sample a trajectory that carries the batch's tensors and ``fields`` ``[N]``, cut to its own tokens."""
        fields = {"rollout_logprobs": self.rollout_logprobs, "advantages": self.advantages, "mask": self.mask, **fields}
        bounds = self.cu_seqlens.tolist()
        return [
            Sample(token_ids(t), t.prompt_ids.size, {name: values[start:stop] for name, values in fields.items()})
            for t, start, stop in zip(self.trajectories, bounds[:-1], bounds[1:], strict=True)
        ]

    def correct(self, train_logprobs: Tensor, config: CorrectionConfig) -> Correction:
        """Weights and metrics of the whole batch, every sequence in one piece."""
        return correct(train_logprobs, self.rollout_logprobs, self.mask, config, cu_seqlens=self.cu_seqlens)


def minibatches(trajectories: list[Trajectory], count: int, seed: tuple[int, ...]) -> list[list[int]]:
    """Trajectory numbers of each optimizer step of one epoch: whole groups, in an order drawn from ``seed``."""
    groups: dict[int, list[int]] = {}
    for number, trajectory in enumerate(trajectories):
        groups.setdefault(trajectory.group, []).append(number)
    # Sorted raw bits: their stream is promised across NumPy versions, a permutation's is not.
    order = np.array(sorted(groups))[np.argsort(np.random.PCG64(list(seed)).random_raw(len(groups)), kind="stable")]
    return [[number for group in part for number in groups[group]] for part in np.array_split(order, count)]


def token_ids(trajectory: Trajectory) -> Tensor:
    """Prompt and response, int64 ``[P + R]``."""
    return torch.from_numpy(np.concatenate([trajectory.prompt_ids, trajectory.response_ids]).astype(np.int64))
