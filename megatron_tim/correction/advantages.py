"""Advantages from the rewards of groups: the samples of one prompt, compared with each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from megatron_tim.correction.settings import Settings

# Added to a standard deviation, as in verl; of no consequence unless the rewards are nearly equal.
STD_EPSILON = 1e-6


class AdvantageConfig(Settings):
    """How rewards become advantages."""

    method: Literal["group_mean", "group_mean_std", "leave_one_out", "reinforce_plus_plus"] = Field(
        "group_mean_std",
        description=(
            "group_mean: reward minus its group's mean (Dr. GRPO). group_mean_std: divided by the group's std too (GRPO)."
            " leave_one_out: reward minus the mean of the others (RLOO). reinforce_plus_plus: reward minus the batch's mean,"
            " divided by its std, whatever the group."
        ),
    )
    whiten: bool = Field(False, description="Then shift and scale to mean 0 and std 1 over the sampled tokens of the batch.")
    rejected: Literal["counted", "excluded"] = Field(
        "counted",
        description=(
            "What a response does to its group once every token of it is rejected. counted: its reward stays in the group's mean"
            " and std. excluded: it has no part in them, nor in the batch's. Either way it has no gradient."
        ),
    )


def advantages(rewards: Tensor, groups: Tensor, config: AdvantageConfig, token_counts: Tensor, included: Tensor | None = None) -> Tensor:
    """The advantage of each response, fp32 ``[N]``.

    Args:
        rewards: ``[N]``, one finite reward a response, any real dtype.
        groups: integer ``[N]``, equal for the responses of one prompt; any labels, in any order.
        config: the method.
        token_counts: ``[N]``, the sampled tokens of each response, which whitening weighs by.
        included: bool ``[N]``; the others get 0 and have no part in any mean. None for all.

    Raises:
        ValueError: a wrong shape or dtype, or a reward that is not finite; names the argument and the value.
    """
    _check(rewards, groups)
    included = torch.ones_like(rewards, dtype=torch.bool) if included is None else included
    found = torch.zeros_like(rewards, dtype=torch.float32)
    chosen = ADVANTAGES[config.method](rewards[included], groups[included])
    found[included] = whiten(chosen, token_counts[included]) if config.whiten else chosen
    return found


def group_mean(rewards: Tensor, groups: Tensor) -> Tensor:
    """Reward minus the mean of its group; exactly 0 in a group of one or of equal rewards.

    Args:
        rewards: ``[N]``, one finite reward a response, any real dtype.
        groups: integer ``[N]``, equal for the responses of one prompt; any labels, in any order.

    Returns:
        fp32 ``[N]``.

    Raises:
        ValueError: a wrong shape or dtype, or a reward that is not finite; names the argument and the value.
    """
    centred, _, _ = _centred(rewards, groups)
    return centred.float()


def group_mean_std(rewards: Tensor, groups: Tensor) -> Tensor:
    """GRPO: :func:`group_mean` divided by the group's sample standard deviation plus 1e-6; 0 in a group of one.

    Takes, returns and raises what :func:`group_mean` does.
    """
    return _over_std(*_centred(rewards, groups))


def leave_one_out(rewards: Tensor, groups: Tensor) -> Tensor:
    """RLOO: reward minus the mean of the others of its group; 0 in a group of one.

    Takes, returns and raises what :func:`group_mean` does.
    """
    centred, member, size = _centred(rewards, groups)
    return (centred * (size / (size - 1).clamp(min=1))[member]).float()


def reinforce_plus_plus(rewards: Tensor, groups: Tensor) -> Tensor:
    """REINFORCE++: reward minus the mean of the batch, divided by its standard deviation plus 1e-6.

    Takes, returns and raises what :func:`group_mean` does.
    """
    _check(rewards, groups)
    return _over_std(*_centred(rewards, torch.zeros_like(groups)))


ADVANTAGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "group_mean": group_mean,
    "group_mean_std": group_mean_std,
    "leave_one_out": leave_one_out,
    "reinforce_plus_plus": reinforce_plus_plus,
}


def whiten(values: Tensor, counts: Tensor) -> Tensor:
    """``values`` minus their mean, divided by their standard deviation plus 1e-6, each counted ``counts`` times; fp32."""
    values, counts = values.double(), counts.double()
    total = counts.sum().clamp(min=1)
    centred = values - (values * counts).sum() / total
    return (centred / ((centred.square() * counts).sum() / total).sqrt().add(STD_EPSILON)).float()


def _over_std(centred: Tensor, member: Tensor, size: Tensor) -> Tensor:
    squares = centred.new_zeros(size.shape).index_add(0, member, centred.square())
    std = (squares / (size - 1).clamp(min=1)).sqrt()
    return (centred / (std[member] + STD_EPSILON)).float()


def _centred(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards minus their group's mean in fp64, the index of each one's group, and the size of each group."""
    _check(rewards, groups)
    _, member, size = torch.unique(groups, return_inverse=True, return_counts=True)
    rewards = rewards.double()
    # Taking the smallest of the group off first makes equal rewards exactly 0; the rounding of their mean would not.
    smallest = rewards.new_full(size.shape, torch.inf).scatter_reduce(0, member, rewards, "amin")
    above = rewards - smallest[member]
    means = above.new_zeros(size.shape).index_add(0, member, above) / size
    return above - means[member], member, size


def _check(rewards: Tensor, groups: Tensor) -> None:
    if rewards.dim() != 1 or groups.shape != rewards.shape:
        shapes = f"rewards has shape {tuple(rewards.shape)} and groups {tuple(groups.shape)}"
        raise ValueError(f"{shapes}; both must be [N], one entry a response.")
    if groups.is_floating_point() or groups.is_complex() or groups.dtype == torch.bool:
        raise ValueError(f"groups has dtype {groups.dtype}; it must be an integer type.")
    wrong = ~torch.isfinite(rewards)
    if wrong.any():
        place = int(wrong.nonzero()[0])
        raise ValueError(f"rewards[{place}] = {rewards[place].item()} is not finite; give every response a number.")
