"""Trajectories turned into the tensors of a step: samples, advantages, weights, minibatches."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from megatron_tim.correction import AdvantageConfig, Correction, CorrectionConfig, advantages, correct
from megatron_tim.correction.sequences import sequence_sum
from megatron_tim.megatron.packing import Sample
from megatron_tim.rollout.trajectory import Trajectory


@dataclasses.dataclass(frozen=True)
class RolloutBatch:
    """A rollout batch as packed tensors over all response tokens, trajectory by trajectory."""

    trajectories: list[Trajectory]
    rollout_logprobs: Tensor
    """float32 ``[N]``."""
    mask: Tensor
    """bool ``[N]``: the tokens that the policy sampled."""
    cu_seqlens: Tensor
    """int64 ``[trajectories + 1]``."""

    @classmethod
    def from_trajectories(cls, trajectories: list[Trajectory]) -> RolloutBatch:
        lengths = torch.tensor([t.response_ids.size for t in trajectories])
        return cls(
            trajectories=trajectories,
            rollout_logprobs=torch.from_numpy(np.concatenate([t.rollout_logprobs for t in trajectories])),
            mask=torch.from_numpy(np.concatenate([t.response_mask for t in trajectories])),
            cu_seqlens=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        )

    def samples(self, **fields: Tensor) -> list[Sample]:
        """One sample a trajectory that carries the batch's tensors and ``fields`` ``[N]``, cut to its own tokens."""
        fields = {"rollout_logprobs": self.rollout_logprobs, "mask": self.mask, **fields}
        bounds = self.cu_seqlens.tolist()
        return [
            Sample(token_ids(t), t.prompt_ids.size, {name: values[start:stop] for name, values in fields.items()})
            for t, start, stop in zip(self.trajectories, bounds[:-1], bounds[1:], strict=True)
        ]

    def advantages(self, config: AdvantageConfig, keep: Tensor) -> Tensor:
        """float32 ``[N]``: each token has its trajectory's; ``keep`` bool ``[N]`` are the tokens that no rule rejected."""
        rewards = torch.tensor([t.reward for t in self.trajectories], dtype=torch.float32)
        groups = torch.tensor([t.group for t in self.trajectories])
        kept, sampled = (sequence_sum(tokens, self.cu_seqlens) for tokens in (keep, self.mask))
        included = kept > 0 if config.rejected == "excluded" else None
        return advantages(rewards, groups, config, sampled, included).repeat_interleave(self.cu_seqlens.diff())

    def correct(self, train_logprobs: Tensor, config: CorrectionConfig, temperature: float) -> Correction:
        """Weights and metrics of the whole batch, every sequence in one piece; ``temperature`` is the train log-probs'."""
        recorded = {t.logprob_temperature for t in self.trajectories}
        return correct(
            train_logprobs,
            self.rollout_logprobs,
            self.mask,
            config,
            cu_seqlens=self.cu_seqlens,
            train_temperature=temperature,
            rollout_temperature=max(recorded, key=lambda value: abs(value - temperature)),
        )


def minibatches(groups: list[int], count: int, seed: tuple[int, ...]) -> list[list[int]]:
    """Sample numbers of each optimizer step of one epoch: whole groups, in an order drawn from ``seed``.

    Args:
        groups: the group of each sample.
        count: how many optimizer steps.
        seed: of the order.
    """
    members: dict[int, list[int]] = {}
    for number, group in enumerate(groups):
        members.setdefault(group, []).append(number)
    # Sorted raw bits: their stream is promised across NumPy versions, a permutation's is not.
    order = np.array(sorted(members))[np.argsort(np.random.PCG64(list(seed)).random_raw(len(members)), kind="stable")]
    return [[number for group in part for number in members[group]] for part in np.array_split(order, count)]


def token_ids(trajectory: Trajectory) -> Tensor:
    """Prompt and response, int64 ``[P + R]``."""
    return torch.from_numpy(np.concatenate([trajectory.prompt_ids, trajectory.response_ids]).astype(np.int64))
