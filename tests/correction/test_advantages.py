import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_tim.correction import AdvantageConfig, advantages, group_mean, group_mean_std, leave_one_out, reinforce_plus_plus, whiten
from megatron_tim.correction.advantages import ADVANTAGES
from tests.correction.batches import examples

pairs = st.lists(st.tuples(st.one_of(st.sampled_from([0.0, 1.0]), st.floats(-100, 100)), st.integers(-3, 3)), max_size=30)
WITHIN_GROUPS = [group_mean, group_mean_std, leave_one_out]


def tensors(pairs: list[tuple[float, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    rewards = torch.tensor([reward for reward, _ in pairs], dtype=torch.float64)
    return rewards, torch.tensor([group for _, group in pairs], dtype=torch.int64)


@examples
@given(pairs=pairs)
def test_every_method_equals_loops(pairs: list[tuple[float, int]]) -> None:
    rewards, groups = tensors(pairs)
    members = {group: [reward for reward, other in pairs if other == group] for _, group in pairs}
    centred = [reward - statistics.fmean(members[group]) for reward, group in pairs]
    stds = [statistics.stdev(members[group]) if len(members[group]) > 1 else 0 for _, group in pairs]
    assert group_mean(rewards, groups).tolist() == pytest.approx(centred, rel=1e-5, abs=1e-5)
    scaled = [value / (std + 1e-6) for value, std in zip(centred, stds, strict=True)]
    assert group_mean_std(rewards, groups).tolist() == pytest.approx(scaled, rel=1e-4, abs=1e-5)
    others = [mean_of_the_others(members[group], reward) for reward, group in pairs]
    expected = [reward - other for (reward, _), other in zip(pairs, others, strict=True)]
    assert leave_one_out(rewards, groups).tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)
    everything = [reward for reward, _ in pairs]
    if len(everything) > 1:
        middle, std = statistics.fmean(everything), statistics.stdev(everything)
        expected = [(reward - middle) / (std + 1e-6) for reward in everything]
        assert reinforce_plus_plus(rewards, groups).tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def mean_of_the_others(rewards: list[float], own: float) -> float:
    others = list(rewards)
    others.remove(own)
    return statistics.fmean(others) if others else own


@pytest.mark.parametrize("advantage", WITHIN_GROUPS)
@examples
@given(reward=st.floats(-10, 10), size=st.integers(1, 12))
def test_a_group_of_one_or_of_equal_rewards_is_exactly_0(advantage, reward: float, size: int) -> None:
    """The mean of three times 0.1 is not 0.1 in floating point; the advantage must still be 0."""
    rewards, groups = torch.tensor([0.1] * 3 + [reward] * size, dtype=torch.float64), torch.tensor([9] * 3 + [4] * size)
    assert advantage(rewards, groups).tolist() == [0] * (3 + size)


def test_a_batch_of_equal_rewards_is_exactly_0() -> None:
    assert reinforce_plus_plus(torch.full((3,), 0.1), torch.tensor([0, 0, 1])).tolist() == [0, 0, 0]


def test_by_hand() -> None:
    rewards, groups = torch.tensor([1, 0, 0, 0, 5, 3]), torch.tensor([2, 2, 2, 2, 0, 0], dtype=torch.int32)
    assert group_mean(rewards, groups).tolist() == [0.75, -0.25, -0.25, -0.25, 1, -1]
    assert leave_one_out(rewards, groups).tolist() == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3, 2, -2])
    assert group_mean_std(rewards, groups).tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5, 0.5**0.5, -(0.5**0.5)], rel=1e-5)
    assert reinforce_plus_plus(rewards, groups).tolist() == pytest.approx([-0.2411, *[-0.7234] * 3, 1.6879, 0.7234], rel=1e-3)
    assert all(method(rewards, groups).dtype == torch.float32 for method in ADVANTAGES.values())


def test_nearly_equal_rewards_are_damped() -> None:
    rewards = torch.tensor([0.0, 1e-6], dtype=torch.float64)
    expected = 0.5e-6 / (0.5**0.5 * 1e-6 + 1e-6)
    assert group_mean_std(rewards, torch.tensor([0, 0])).tolist() == pytest.approx([-expected, expected])


@examples
@given(values=st.lists(st.tuples(st.floats(-50, 50), st.integers(0, 9)), max_size=20))
def test_whitening_is_over_tokens(values: list[tuple[float, int]]) -> None:
    """As if each response's value stood there once a token."""
    numbers, counts = (torch.tensor(column, dtype=torch.float64) for column in (zip(*values, strict=True) if values else ([], [])))
    tokens = [value for value, count in values for _ in range(count)]
    middle, std = (statistics.fmean(tokens), statistics.pstdev(tokens)) if tokens else (0.0, 0.0)
    expected = [(value - middle) / (std + 1e-6) for value, _ in values]
    assert whiten(numbers, counts).tolist() == pytest.approx(expected, rel=1e-4, abs=1e-4)


REWARDS, GROUPS, COUNTS = torch.tensor([1.0, 0.0, 0.0, 4.0, 2.0]), torch.tensor([0, 0, 0, 1, 1]), torch.tensor([5, 5, 5, 5, 5])
REJECTED = torch.tensor([True, True, False, True, True])


def test_a_rejected_response_counts_in_its_group_or_does_not() -> None:
    """Its reward of 0 either pulls the mean of (1, 0, 0) down to 1/3, or leaves (1, 0) with 1/2 and takes 0 itself."""
    counted = advantages(REWARDS, GROUPS, AdvantageConfig(method="group_mean"), COUNTS)
    assert counted.tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3, 1, -1])
    excluded = advantages(REWARDS, GROUPS, AdvantageConfig(method="group_mean"), COUNTS, REJECTED)
    assert excluded.tolist() == [0.5, -0.5, 0, 1, -1]


def test_whitening_leaves_excluded_responses_out() -> None:
    found = advantages(REWARDS, GROUPS, AdvantageConfig(method="group_mean", whiten=True), COUNTS, REJECTED)
    expected = whiten(torch.tensor([0.5, -0.5, 1.0, -1.0]), torch.full((4,), 5))
    assert found[2] == 0 and torch.equal(found[REJECTED], expected)


def test_the_method_of_the_configuration_is_used() -> None:
    for name, method in ADVANTAGES.items():
        assert torch.equal(advantages(REWARDS, GROUPS, AdvantageConfig(method=name), COUNTS), method(REWARDS, GROUPS))


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
