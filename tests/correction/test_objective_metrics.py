import math

import pytest
import torch
from hypothesis import given

from megatron_tim.correction import CorrectionConfig, LossConfig, objective_metrics, summarise, token_objective
from tests.correction import reference
from tests.correction.batches import Token, examples, padded, padded_mask, sequences

PPO = LossConfig(name="ppo", clip_low=0.1, clip_high=0.3)


def expected_metrics(rows: list[list[Token]], bypass: bool) -> dict[str, float]:
    sampled = [token for row in rows for token in row if token.sampled]
    finite = [token for token in sampled if math.isfinite(token.rollout) and (bypass or math.isfinite(token.train))]
    metrics = {"objective/tokens": len(sampled), "objective/nonfinite_tokens": len(sampled) - len(finite)}
    forms = {"bypass": "rollout"} if bypass else {"recompute": "train", "bypass": "rollout"}
    for form, field in forms.items():
        logs = [token.current - getattr(token, field) for token in finite]
        terms = [-(math.exp(reference.bound(log)) - 1) * token.advantage for log, token in zip(logs, finite, strict=True)]
        pairs = list(zip(terms, finite, strict=True))
        metrics[f"objective/{form}/contribution_positive"] = reference.average(c for c, token in pairs if token.advantage > 0)
        metrics[f"objective/{form}/contribution_negative"] = reference.average(c for c, token in pairs if token.advantage < 0)
        metrics[f"objective/{form}/k1"] = reference.average(-log for log in logs)
        metrics[f"objective/{form}/k3"] = reference.average(math.exp(reference.bound(log)) - 1 - log for log in logs)
    used = forms.get("recompute", "rollout")
    ratios = [(math.exp(token.current - getattr(token, used)), token.advantage) for token in finite]
    metrics["objective/clip_high"] = reference.average(float(r > 1 + PPO.clip_high and a > 0) for r, a in ratios)
    metrics["objective/clip_low"] = reference.average(float(r < 1 - PPO.clip_low and a < 0) for r, a in ratios)
    metrics["actor/pg_clipfrac"] = metrics["objective/clip_high"] + metrics["objective/clip_low"]
    metrics["actor/ppo_kl"] = metrics[f"objective/{'bypass' if bypass else 'recompute'}/k1"]
    return metrics


@examples
@given(rows=sequences())
def test_both_forms_equal_loops(rows: list[list[Token]]) -> None:
    for bypass in (False, True):
        metrics = objective_metrics(
            padded(rows, "current"),
            None if bypass else padded(rows, "train"),
            padded(rows, "rollout"),
            padded(rows, "advantage"),
            padded_mask(rows),
            PPO,
        )
        expected = expected_metrics(rows, bypass)
        assert metrics.keys() == expected.keys()
        for name, value in expected.items():
            assert metrics[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name


@pytest.mark.parametrize("mode", ["recompute", "bypass"])
def test_the_trainer_reports_the_same_numbers(mode: str) -> None:
    """What token_objective sums over a micro-batch is what objective_metrics says of the same tensors."""
    generator = torch.Generator().manual_seed(3)
    current, old, rollout, advantages = torch.randn(4, 2, 9, generator=generator, dtype=torch.float64).unbind()
    current, old, rollout = (-values.abs() for values in (current, old, rollout))
    old = None if mode == "bypass" else old
    mask = torch.rand(2, 9, generator=generator) > 0.3
    _, sums = token_objective(
        current,
        None,
        old_logprobs=old,
        rollout_logprobs=rollout,
        advantages=advantages,
        mask=mask,
        weights=None if mode == "bypass" else torch.ones(2, 9),
        correction=CorrectionConfig(method="none", mode=mode),
        loss=PPO,
    )
    metrics = summarise(sums)
    expected = objective_metrics(current, old, rollout, advantages, mask, PPO)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-12)


def test_an_unmoved_policy_contributes_nothing() -> None:
    """With one optimizer step a rollout batch r = 1: C(r) and clipping are idle in recompute form; bypass sees the mismatch."""
    old, rollout = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]])
    metrics = objective_metrics(old, old, rollout, torch.tensor([[1.0, -1.0]]), torch.tensor([[True, True]]), PPO)
    assert all(value == 0 for name, value in metrics.items() if "recompute" in name or "clip" in name)
    assert metrics["objective/bypass/contribution_positive"] == pytest.approx(-math.expm1(0.5))
    assert metrics["objective/bypass/contribution_negative"] == pytest.approx(math.expm1(-1.0))
    assert metrics["objective/bypass/k1"] == pytest.approx(0.25)


@pytest.mark.parametrize("place", range(3))
def test_a_broken_log_prob_is_dropped_and_counted(place: int) -> None:
    inputs = [torch.tensor([[-1.0, -2.0]]) for _ in range(3)]
    inputs[place][0, 1] = math.nan
    metrics = objective_metrics(*inputs, torch.ones(1, 2), torch.tensor([[True, True]]), PPO)
    assert metrics["objective/tokens"] == 2 and metrics["objective/nonfinite_tokens"] == 1
    assert all(value == 0 for name, value in metrics.items() if not name.endswith("tokens"))


def test_without_a_loss_there_is_no_clipping_to_report() -> None:
    zeros, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    names = objective_metrics(zeros, None, zeros, zeros, mask).keys()
    assert names == {
        "objective/tokens",
        "objective/nonfinite_tokens",
        "objective/bypass/contribution_positive",
        "objective/bypass/contribution_negative",
        "objective/bypass/k1",
        "objective/bypass/k3",
        "actor/ppo_kl",
    }


def test_metrics_ask_for_no_gradient() -> None:
    leaf = torch.zeros(1, 2, requires_grad=True)
    objective_metrics(leaf, leaf, leaf, leaf, torch.ones(1, 2, dtype=torch.bool), PPO)
    assert leaf.grad is None


def test_absurd_but_finite_ratios_give_finite_numbers() -> None:
    far = torch.tensor([[-1e38, -0.5]])
    metrics = objective_metrics(far, None, far.flip(1), torch.tensor([[1.0, -1.0]]), torch.tensor([[True, True]]), PPO)
    assert all(map(math.isfinite, metrics.values()))
    assert metrics["objective/bypass/contribution_negative"] == pytest.approx(math.exp(20))
