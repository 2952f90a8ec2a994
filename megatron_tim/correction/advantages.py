"""Advantages from the rewards of groups: the samples of one prompt, compared with each other."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# Added to a group's standard deviation, as in verl; of no consequence unless the rewards are nearly equal.
STD_EPSILON = 1e-6


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
    centred, member, size = _centred(rewards, groups)
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


ADVANTAGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"group_mean": group_mean, "group_mean_std": group_mean_std}
