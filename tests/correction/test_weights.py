import math
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_tim.correction import CorrectionConfig, Method
from megatron_tim.correction.config import SEQUENCE_METHODS
from megatron_tim.correction.displacement import displacement
from megatron_tim.correction.tokens import TokenBatch
from megatron_tim.correction.weights import TOKEN_WEIGHTS, confidence_cap
from tests.correction.batches import examples


def weight(method: str, train: torch.Tensor, rollout: torch.Tensor, **parameters: float) -> torch.Tensor:
    everything = torch.ones_like(train, dtype=torch.bool)
    tokens = TokenBatch.from_logprobs(train, rollout, everything, everything, None)
    return TOKEN_WEIGHTS[method](tokens, Method(method=method, **parameters))


def from_room_and_displacement(room: list[float], eps: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the train policy with 1 - p = room and of a rollout policy displaced by -eps in log-odds."""
    train = torch.log1p(-torch.tensor(room, dtype=torch.float64))
    log_odds = train - torch.log(-torch.expm1(train)) - torch.tensor(eps, dtype=torch.float64)
    return train, torch.nn.functional.logsigmoid(log_odds)


def test_every_method_of_the_configuration_has_a_weight() -> None:
    assert {*TOKEN_WEIGHTS, *SEQUENCE_METHODS} == set(get_args(CorrectionConfig.model_fields["method"].annotation))


def test_weights_by_hand() -> None:
    train = torch.tensor([0.5, 0.5, 0.5, 0.999, 0.999], dtype=torch.float64).log()
    rollout = torch.tensor([0.4, 0.1, 1.0, 0.999 / 1.05, 0.9999], dtype=torch.float64).log()
    assert weight("none", train, rollout).tolist() == [1, 1, 1, 1, 1]
    assert weight("tis", train, rollout).tolist() == pytest.approx([1.25, 2, 0.5, 1.05, 0.999 / 0.9999])
    assert weight("exact", train, rollout).tolist() == pytest.approx([1.25, 5, 0.5, 1.05, 0.999 / 0.9999])
    assert weight("band", train, rollout, low=0.8, high=1.2).tolist() == pytest.approx([1.2, 1.2, 0.8, 1.05, 0.999 / 0.9999])
    assert weight("icepop", train, rollout, high=4).tolist() == pytest.approx([1.25, 0, 0.5, 1.05, 0.999 / 0.9999])
    # KL(0.5, 0.1) = 0.511, KL(0.1, 0.5) = 0.368; q = 1 is clamped to 1 - 1e-6, which is 6.2 away
    assert weight("kpop", train, rollout).tolist() == pytest.approx([1.25, 5, 0, 1.05, 0.999 / 0.9999])
    assert weight("kpop", train, rollout, phi=0.5).tolist() == pytest.approx([1.25, 0, 0, 1.05, 0.999 / 0.9999])
    # 1 + 2.3 * 0.5 for p = 0.5; for p = 0.999 kappa = 0.005 is the larger one
    assert weight("cis", train, rollout).tolist() == pytest.approx([1.25, 2.15, 0.5, 1.0115, 0.999 / 0.9999])


@examples
@given(room=st.floats(-12, -0.01), eps=st.floats(-8, 8), lam=st.floats(0.01, 20))
def test_cap_on_k_is_a_cap_on_the_displacement(room: float, eps: float, lam: float) -> None:
    """Where 1 - p > kappa, f = p + (1 - p) e^min(eps, log(1 + lam)), to 1e-12 over 12 orders of 1 - p."""
    train, rollout = from_room_and_displacement([10**room], [eps])
    capped = displacement(train, rollout).clamp(max=math.log1p(lam))
    expected = train.exp() - torch.expm1(train) * capped.exp()
    assert weight("cis", train, rollout, lam=lam, kappa=0.0).item() == pytest.approx(expected.item(), rel=1e-12)


@examples
@given(
    tokens=st.lists(st.tuples(st.floats(-12, -0.001), st.one_of(st.floats(-2, 2), st.floats(0, 30))), min_size=1, max_size=50),
    lam=st.floats(0, 10),
)
def test_second_moment_of_the_capped_displacement_is_bounded(tokens: list[tuple[float, float]], lam: float) -> None:
    """E[((1 - p) e^min(eps, log(1 + lam)))^2] <= (1 + lam)^2, however heavy the tail of eps."""
    train, rollout = from_room_and_displacement([10**room for room, _ in tokens], [eps for _, eps in tokens])
    moved = weight("cis", train, rollout, lam=lam, kappa=0.0) - train.exp()
    assert moved.square().mean().item() <= (1 + lam) ** 2 * (1 + 1e-12)


def test_confidence_cap_of_the_paper() -> None:
    cap = confidence_cap(torch.tensor([0.565, 0.566, 1 - 1e-9], dtype=torch.float64).log(), 2.3, 5e-3)
    assert cap[0] > 2 > cap[1]
    assert cap[2].item() == pytest.approx(1.0115, abs=1e-12)


@examples
@given(room=st.floats(-12, -0.01), eps=st.floats(-8, 8))
def test_lam_0_is_tis_at_1(room: float, eps: float) -> None:
    train, rollout = from_room_and_displacement([10**room], [eps])
    assert torch.equal(weight("cis", train, rollout, lam=0.0), weight("tis", train, rollout, cap=1.0))


@pytest.mark.parametrize("method", sorted(TOKEN_WEIGHTS))
def test_overflow_of_the_ratio_is_capped(method: str) -> None:
    """k = exp(200) is held at exp(20); a capped weight is its cap."""
    train, rollout = torch.tensor([-0.5]), torch.tensor([-200.5])
    largest = math.exp(20)
    expected = {"none": 1, "tis": 2, "cis": 1 + 2.3 * (1 - math.exp(-0.5)), "band": 2, "icepop": 0, "kpop": 0, "exact": largest}
    assert weight(method, train, rollout).item() == pytest.approx(expected[method])
