import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_tim.correction import displacement, log_odds, mismatch_ratio
from megatron_tim.correction.displacement import bounded_ratio, one_minus_p
from tests.correction.batches import examples


def fp64(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


@examples
@given(room=st.floats(-12, -0.01), other=st.floats(-12, -0.01))
def test_ratio_is_p_plus_room_times_exp_of_displacement(room: float, other: float) -> None:
    """Lemma 3.1, k = p + (1 - p) e^eps, to 1e-12 over 12 orders of magnitude of 1 - p on both sides."""
    train, rollout = fp64(math.log1p(-(10**room))), fp64(math.log1p(-(10**other)))
    k = mismatch_ratio(train, rollout)
    growth = displacement(train, rollout).exp()
    assert k.item() == pytest.approx((train.exp() + one_minus_p(train) * growth).item(), rel=1e-12)
    # k - 1 loses digits when k is near 1, so it is formed without the subtraction.
    assert torch.expm1(train - rollout).item() == pytest.approx((one_minus_p(train) * (growth - 1)).item(), rel=1e-9, abs=1e-12)


@examples
@given(logprob=st.floats(-300, -1e-12))
def test_log_odds_against_the_definition(logprob: float) -> None:
    p = math.exp(logprob)
    assert log_odds(fp64(logprob)).item() == pytest.approx(logprob - math.log(-math.expm1(logprob)), rel=1e-14)
    assert one_minus_p(fp64(logprob)).item() == pytest.approx(1 - p, abs=1e-15)


def test_sure_and_impossible_tokens() -> None:
    zero, one = fp64(-math.inf), fp64(0.0)
    assert log_odds(one) == math.inf and log_odds(zero) == -math.inf
    assert displacement(one, one) == 0 and displacement(zero, zero) == 0
    assert displacement(one, fp64(-1.0)) == math.inf and displacement(zero, fp64(-1.0)) == -math.inf
    assert mismatch_ratio(zero, fp64(-1.0)) == 0
    assert mismatch_ratio(one, fp64(-1.0)) == pytest.approx(math.e)


def test_room_is_never_negative() -> None:
    assert one_minus_p(fp64(1e-6)) == 0


def test_fp32_keeps_the_digits_of_a_sure_token() -> None:
    assert one_minus_p(torch.tensor(-1e-7)).item() == pytest.approx(1e-7, rel=1e-6)


def test_bounded_ratio_is_finite_for_finite_inputs() -> None:
    far = torch.tensor([-3e38, -3.0, -1.0])
    ratio = bounded_ratio(far, far.flip(0))
    assert ratio.tolist() == pytest.approx([0.0, 1.0, math.exp(20)])
