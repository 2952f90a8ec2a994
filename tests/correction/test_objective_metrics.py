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
        for sign, side in {"positive": 1, "negative": -1}.items():
            values = [c for c, token in pairs if token.advantage * side > 0]
            for label, share in {"q05": 0.05, "median": 0.5, "q95": 0.95}.items():
                metrics[f"objective/{form}/contribution_{sign}/{label}"] = (values, share)
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
            if isinstance(value, tuple):
                check_quantile(metrics[name], *value)
            else:
                assert metrics[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name


def check_quantile(found: float, values: list[float], share: float) -> None:
    """In the histogram's bin of the value that has this share below it: within 10 %, or between 1e-6 and -1e-6."""
    if not values:
        assert found == 0
        return
    exact = reference.quantile(values, share)
    edges = sorted({reference.quantile(values, min(1, max(0, share + slack))) for slack in (-1e-9, 1e-9)} | {exact})
    assert min(edges) - 0.1 * abs(min(edges)) - 1e-6 <= found <= max(edges) + 0.1 * abs(max(edges)) + 1e-6


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
    assert {name for name in names if not name.endswith(("q05", "median", "q95"))} == {
        "objective/tokens",
        "objective/nonfinite_tokens",
        "objective/bypass/contribution_positive",
        "objective/bypass/contribution_negative",
        "objective/bypass/k1",
        "objective/bypass/k3",
        "actor/ppo_kl",
    }


def test_the_skew_of_each_sign_is_seen() -> None:
    """100 tokens with A = 2 and r - 1 from 0.01 to 1: C runs from -0.02 to -2; those with A < 0 stay where they are."""
    current, zeros, advantages = torch.log1p(torch.arange(1, 101) / 100.0)[None], torch.zeros(1, 100), torch.full((1, 100), 2.0)
    current, advantages = torch.cat([current, zeros], 1), torch.cat([advantages, -advantages], 1)
    metrics = objective_metrics(current, None, torch.zeros(1, 200), advantages, torch.ones(1, 200, dtype=torch.bool))
    found = [metrics[f"objective/bypass/contribution_positive/{label}"] for label in ("q05", "median", "q95")]
    assert found == pytest.approx([-1.9, -1.0, -0.1], rel=0.1)
    assert all(metrics[f"objective/bypass/contribution_negative/{label}"] == 0 for label in ("q05", "median", "q95"))


def test_gspo_clips_whole_sequences() -> None:
    """The ratios of a sequence cancel in its mean: no token is clipped, though each is far out of bounds."""
    current, zeros = torch.tensor([1.0, -1.0, 1.0, 1.0]), torch.zeros(4)
    inputs = current, None, zeros, torch.tensor([1.0, 1.0, 1.0, 1.0]), torch.ones(4, dtype=torch.bool), LossConfig(name="gspo")
    assert objective_metrics(*inputs, torch.tensor([0, 2, 4]))["objective/clip_high"] == 0.5


def test_dual_clips_are_counted() -> None:
    loss = LossConfig(name="ppo", dual_clip=3.0)
    inputs = torch.tensor([[2.0, 2.0, 0.0, 0.0]]), None, torch.zeros(1, 4), torch.tensor([[-1.0, 1.0, -1.0, 1.0]])
    metrics = objective_metrics(*inputs, torch.ones(1, 4, dtype=torch.bool), loss)
    assert metrics["actor/pg_clipfrac_lower"] == 0.25 and metrics["objective/clip_high"] == 0.25


def test_metrics_ask_for_no_gradient() -> None:
    leaf = torch.zeros(1, 2, requires_grad=True)
    objective_metrics(leaf, leaf, leaf, leaf, torch.ones(1, 2, dtype=torch.bool), PPO)
    assert leaf.grad is None


def test_absurd_but_finite_ratios_give_finite_numbers() -> None:
    far = torch.tensor([[-1e38, -0.5]])
    metrics = objective_metrics(far, None, far.flip(1), torch.tensor([[1.0, -1.0]]), torch.tensor([[True, True]]), PPO)
    assert all(map(math.isfinite, metrics.values()))
    assert metrics["objective/bypass/contribution_negative"] == pytest.approx(math.exp(20))
