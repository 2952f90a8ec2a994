import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_tim.correction import ADVANTAGES, group_mean, group_mean_std
from tests.correction.batches import examples

pairs = st.lists(st.tuples(st.one_of(st.sampled_from([0.0, 1.0]), st.floats(-100, 100)), st.integers(-3, 3)), max_size=30)


@examples
@given(pairs=pairs)
def test_both_equal_loops(pairs: list[tuple[float, int]]) -> None:
    rewards = torch.tensor([reward for reward, _ in pairs], dtype=torch.float64)
    groups = torch.tensor([group for _, group in pairs], dtype=torch.int64)
    members = {group: [reward for reward, other in pairs if other == group] for _, group in pairs}
    centred = [reward - statistics.fmean(members[group]) for reward, group in pairs]
    stds = [statistics.stdev(members[group]) if len(members[group]) > 1 else 0 for _, group in pairs]
    assert group_mean(rewards, groups).tolist() == pytest.approx(centred, rel=1e-5, abs=1e-5)
    scaled = [value / (std + 1e-6) for value, std in zip(centred, stds, strict=True)]
    assert group_mean_std(rewards, groups).tolist() == pytest.approx(scaled, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("advantage", ADVANTAGES.values())
@examples
@given(reward=st.floats(-10, 10), size=st.integers(1, 12))
def test_a_group_of_one_or_of_equal_rewards_is_exactly_0(advantage, reward: float, size: int) -> None:
    """The mean of three times 0.1 is not 0.1 in floating point; the advantage must still be 0."""
    rewards, groups = torch.tensor([0.1] * 3 + [reward] * size, dtype=torch.float64), torch.tensor([9] * 3 + [4] * size)
    assert advantage(rewards, groups).tolist() == [0] * (3 + size)


def test_by_hand() -> None:
    rewards, groups = torch.tensor([1, 0, 0, 0, 5, 3]), torch.tensor([2, 2, 2, 2, 0, 0], dtype=torch.int32)
    assert group_mean(rewards, groups).tolist() == [0.75, -0.25, -0.25, -0.25, 1, -1]
    assert group_mean_std(rewards, groups).tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5, 0.5**0.5, -(0.5**0.5)], rel=1e-5)
    assert group_mean(rewards, groups).dtype == group_mean_std(rewards, groups).dtype == torch.float32


def test_nearly_equal_rewards_are_damped() -> None:
    rewards = torch.tensor([0.0, 1e-6], dtype=torch.float64)
    expected = 0.5e-6 / (0.5**0.5 * 1e-6 + 1e-6)
    assert group_mean_std(rewards, torch.tensor([0, 0])).tolist() == pytest.approx([-expected, expected])


@pytest.mark.parametrize("advantage", ADVANTAGES.values())
def test_nothing_in_nothing_out(advantage) -> None:
    assert advantage(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


@pytest.mark.parametrize("advantage", ADVANTAGES.values())
@pytest.mark.parametrize(
    ("rewards", "groups", "sentence"),
    [
        ([[1.0]], [[0]], r"rewards has shape \(1, 1\) and groups \(1, 1\); both must be \[N\], one entry a response"),
        ([1.0, 2.0], [0], r"rewards has shape \(2,\) and groups \(1,\); both must be \[N\], one entry a response"),
        ([1.0], [0.0], "groups has dtype torch.float32; it must be an integer type"),
        ([1.0], [True], "groups has dtype torch.bool; it must be an integer type"),
        ([1.0, float("nan")], [0, 0], r"rewards\[1\] = nan is not finite; give every response a number"),
        ([float("inf"), 1.0], [0, 0], r"rewards\[0\] = inf is not finite; give every response a number"),
    ],
)
def test_wrong_inputs(advantage, rewards: list, groups: list, sentence: str) -> None:
    with pytest.raises(ValueError, match=rf"^{sentence}\.$"):
        advantage(torch.tensor(rewards), torch.tensor(groups))
