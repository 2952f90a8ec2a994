from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_tim.correction import LossConfig, policy_loss
from megatron_tim.correction.losses import TOKEN_LOSSES
from tests.correction import reference
from tests.correction.batches import Token, examples, packed, tokens


def test_every_loss_of_the_configuration_exists() -> None:
    assert set(TOKEN_LOSSES) == set(get_args(LossConfig.model_fields["name"].annotation))


@examples
@given(
    rows=st.lists(tokens(broken=False), min_size=1, max_size=8),
    config=st.builds(LossConfig, name=st.sampled_from(["reinforce", "ppo"]), clip_low=st.floats(0, 0.5), clip_high=st.floats(0, 0.9)),
)
def test_value_and_gradient_equal_the_written_formula(rows: list[Token], config: LossConfig) -> None:
    rows = [token for token in rows if token.sampled]
    current, old, advantages = (packed([rows], field).requires_grad_() for field in ("current", "rollout", "advantage"))
    weights = torch.linspace(0.5, 2, len(rows), dtype=torch.float64).requires_grad_()
    loss, _ = policy_loss(current, old, advantages, weights, config)
    expected = [reference.token_loss(token, w, token.rollout, config) for token, w in zip(rows, weights.tolist(), strict=True)]
    assert loss.tolist() == pytest.approx([value for value, _ in expected], rel=1e-12, abs=1e-12)
    loss.sum().backward()
    assert old.grad is None and advantages.grad is None and weights.grad is None
    for found, (token, (_, slope)) in zip(current.grad.tolist(), zip(rows, expected, strict=True), strict=True):
        if not on_a_bound(token, config):
            assert found == pytest.approx(slope, rel=1e-12, abs=1e-12)


def on_a_bound(token: Token, config: LossConfig) -> bool:
    """Whether the gradient is that of a kink, where it is a matter of convention."""
    ratio = reference.math.exp(token.current - token.rollout)
    return any(abs(ratio - bound) < 1e-12 for bound in (1 - config.clip_low, 1 + config.clip_high)) or token.advantage == 0


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
