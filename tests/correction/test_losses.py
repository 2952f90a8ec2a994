import itertools
import math
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_tim.correction import LossConfig, policy_loss, reference_kl
from megatron_tim.correction.losses import TOKEN_LOSSES
from tests.correction import reference
from tests.correction.batches import Token, cu_seqlens, examples, losses, near_kink, packed, sequences


def test_every_loss_of_the_configuration_exists() -> None:
    assert set(TOKEN_LOSSES) == set(get_args(LossConfig.model_fields["name"].annotation))


@examples
@given(rows=sequences(broken=False), config=losses())
def test_value_and_gradient_equal_the_written_formula(rows: list[list[Token]], config: LossConfig) -> None:
    """The ratio to the rollout policy, weights between 0.5 and 2, packed sequences that gspo must tell apart."""
    rows = [[token for token in row if token.sampled] for row in rows]
    current, old, advantages = (packed(rows, field).requires_grad_() for field in ("current", "rollout", "advantage"))
    weights = torch.linspace(0.5, 2, current.numel(), dtype=torch.float64).requires_grad_()
    loss, _ = policy_loss(current, old, advantages, weights, config, cu_seqlens=cu_seqlens(rows))
    logs = list(itertools.chain(*(reference.log_ratios(row, "rollout", config) for row in rows)))
    everything = list(zip(itertools.chain(*rows), weights.tolist(), logs, strict=True))
    expected = [reference.token_loss(token, weight, log, config) for token, weight, log in everything]
    assert loss.tolist() == pytest.approx([value for value, _ in expected], rel=1e-12, abs=1e-12)
    loss.sum().backward()
    assert old.grad is None and advantages.grad is None and weights.grad is None
    for found, (token, _, log), (_, slope) in zip(current.grad.tolist(), everything, expected, strict=True):
        if not near_kink(log, token.advantage, config):
            assert found == pytest.approx(slope, rel=1e-12, abs=1e-12)


def test_gspo_padded_and_packed_agree() -> None:
    generator = torch.Generator().manual_seed(1)
    current, old, advantages, weights = -torch.rand(4, 3, 5, generator=generator)
    valid = torch.rand(3, 5, generator=generator) > 0.3
    config = LossConfig(name="gspo", clip_low=0.05, clip_high=0.1)
    loss, flags = policy_loss(current, old, advantages, weights, config, valid=valid)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), valid.sum(1).cumsum(0)])
    other, other_flags = policy_loss(current[valid], old[valid], advantages[valid], weights[valid], config, cu_seqlens=offsets)
    assert torch.allclose(loss[valid], other) and torch.equal(flags["clip_high"][valid], other_flags["clip_high"])


def test_gspo_gradient_of_a_sequence_is_that_of_the_paper() -> None:
    """grad of r A, r = (pi / pi_old)^(1/T): with the mean over tokens outside, the token form has the same gradient."""
    current, old = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64).requires_grad_(), torch.tensor([-1.1, -1.9, -0.6]).double()
    loss, _ = policy_loss(current, old, torch.full((3,), 2.0).double(), torch.ones(3).double(), LossConfig(name="gspo", clip_high=0.9))
    (found,) = torch.autograd.grad(loss.sum() / 3, current)
    (expected,) = torch.autograd.grad(-2.0 * (current - old).mean().exp(), current)
    assert torch.allclose(found, expected, rtol=1e-12)


def test_gspo_defaults_clip_what_ppo_leaves() -> None:
    """A ratio of 1.001 on every token is beyond GSPO's 4e-4, and far inside PPO's 0.28, which would leave GSPO inert."""
    current, zeros, ones = torch.full((4,), 1e-3), torch.zeros(4), torch.ones(4)
    for name, clipped in {"gspo": True, "ppo": False}.items():
        _, flags = policy_loss(current, zeros, ones, ones, LossConfig(name=name), cu_seqlens=torch.tensor([0, 4]))
        assert flags["clip_high"].all().item() == clipped


def test_dual_clip_bounds_the_loss_of_a_bad_token() -> None:
    """r = e^3 = 20.1 with A = -2: 40.2 without it, at most 3 * 2 with it, and then no gradient; A > 0 is not touched."""
    current = torch.tensor([3.0, 3.0, 0.5]).requires_grad_()
    loss, flags = policy_loss(
        current, torch.zeros(3), torch.tensor([-2.0, 2.0, -2.0]), torch.ones(3), LossConfig(name="ppo", dual_clip=3.0)
    )
    assert loss.tolist() == pytest.approx([6, -2.56, 2 * 0.5 * 2.718281828**0.5 * 2], rel=1e-6)
    assert flags["dual_clip"].tolist() == [True, False, False]
    loss.sum().backward()
    assert current.grad.tolist() == pytest.approx([0, 0, 2 * 2.718281828**0.5], rel=1e-6)


def test_cispo_keeps_the_gradient_of_a_clipped_token() -> None:
    """r = e^2 = 7.39 is held at 1 + 4; no lower bound unless asked for; the factor has no gradient of its own."""
    current = torch.tensor([2.0, -3.0]).requires_grad_()
    loss, flags = policy_loss(current, torch.zeros(2), torch.ones(2), torch.ones(2), LossConfig(name="cispo"))
    loss.sum().backward()
    assert current.grad.tolist() == pytest.approx([-5, -(2.718281828**-3)], rel=1e-6)
    assert flags["clip_high"].tolist() == [True, False] and flags["clip_low"].tolist() == [False, False]
    _, flags = policy_loss(current, torch.zeros(2), torch.ones(2), torch.ones(2), LossConfig(name="cispo", clip_low=0.2))
    assert flags["clip_low"].tolist() == [False, True]


@examples
@given(current=st.floats(-20, 0), other=st.floats(-20, 0))
def test_reference_kl_and_its_gradient(current: float, other: float) -> None:
    s = current - other
    expected = {"k1": (s, 1.0), "k2": (s * s / 2, s), "k3": (math.exp(-s) - 1 + s, 1 - math.exp(-s))}
    for name, (value, slope) in expected.items():
        leaf = torch.tensor(current, dtype=torch.float64, requires_grad=True)
        reference_leaf = torch.tensor(other, dtype=torch.float64, requires_grad=True)
        found = reference_kl(leaf, reference_leaf, name)
        found.backward()
        assert found.item() == pytest.approx(value, rel=1e-12, abs=1e-12)
        assert leaf.grad.item() == pytest.approx(slope, rel=1e-12, abs=1e-12)
        assert reference_leaf.grad is None


def test_reference_kl_of_absurd_log_probs_is_finite() -> None:
    leaf = torch.tensor([-1e4], requires_grad=True)
    value = reference_kl(leaf, torch.tensor([-1.0]), "k3")
    value.backward()
    assert value.item() == pytest.approx(math.exp(20), rel=1e-4) and leaf.grad.isfinite().all()


def test_clipping_is_asymmetric_and_one_sided() -> None:
    """r = 1.3 with bounds 0.9 and 1.28 is clipped for A > 0 alone; r = 0.85 for A < 0 alone; r = 1.25 never."""
    ratio = torch.tensor([1.3, 1.3, 0.85, 0.85, 1.25, 1.25])
    current = ratio.log().requires_grad_()
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0])
    config = LossConfig(name="ppo", clip_low=0.1, clip_high=0.28)
    loss, flags = policy_loss(current, torch.zeros(6), advantages, torch.ones(6), config)
    assert loss.tolist() == pytest.approx([-1.28, 1.3, -0.85, 0.9, -1.25, 1.25])
    assert flags["clip_high"].tolist() == [True] + [False] * 5
    assert flags["clip_low"].tolist() == [False] * 3 + [True] + [False] * 2
    loss.sum().backward()
    assert current.grad.tolist() == pytest.approx([0, 1.3, -0.85, 0, -1.25, 1.25])


def test_no_advantage_is_never_clipped() -> None:
    config = LossConfig(name="ppo")
    _, flags = policy_loss(torch.tensor([1.0, -1.0]), torch.zeros(2), torch.zeros(2), torch.ones(2), config)
    assert not flags["clip_high"].any() and not flags["clip_low"].any()


def test_a_ratio_on_the_bound_is_not_clipped() -> None:
    config = LossConfig(name="ppo", clip_low=0, clip_high=0)
    _, flags = policy_loss(torch.zeros(2), torch.zeros(2), torch.tensor([1.0, -1.0]), torch.ones(2), config)
    assert not flags["clip_high"].any() and not flags["clip_low"].any()


def test_reinforce_has_no_flags() -> None:
    loss, flags = policy_loss(torch.tensor([-2.0]), torch.tensor([-9.0]), torch.tensor([3.0]), torch.tensor([0.5]), LossConfig())
    assert loss.tolist() == [3.0] and flags == {}
