import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_tim.correction import (
    CorrectionConfig,
    LossConfig,
    MetricSums,
    correct,
    denominator_parts,
    summarise,
    token_coefficients,
    token_objective,
)
from tests.correction import reference
from tests.correction.batches import Token, examples, losses, near_kink, padded, padded_mask, sequences

METHODS = ["none", "tis", "cis"]


def run(rows: list[list[Token]], correction: CorrectionConfig, loss: LossConfig, **changes: torch.Tensor | None):
    """The objective of a batch, the current log-probs as its leaf, and the sums of its metrics."""
    mask, bypass = padded_mask(rows), correction.mode == "bypass"
    leaf = padded(rows, "current").requires_grad_()
    old = padded(rows, "train")
    inputs = {
        "entropy": None,
        "old_logprobs": None if bypass else old,
        "rollout_logprobs": padded(rows, "rollout"),
        "advantages": padded(rows, "advantage"),
        "mask": mask,
        "weights": None if bypass else correct(old, padded(rows, "rollout"), mask, correction).weights,
    }
    value, sums = token_objective(leaf, **inputs | changes, correction=correction, loss=loss)
    return value, leaf, sums


@examples
@given(rows=sequences(), method=st.sampled_from(METHODS), loss=losses())
def test_recompute_equals_loops(rows: list[list[Token]], method: str, loss: LossConfig) -> None:
    """Weights of the old policy, fixed; r = pi_theta / pi_old, which is not 1."""
    config = CorrectionConfig(method=method)
    check(rows, config, loss, "train", lambda token: reference.weight(token, config))


@examples
@given(rows=sequences(), method=st.sampled_from(METHODS), loss=losses())
def test_bypass_equals_loops(rows: list[list[Token]], method: str, loss: LossConfig) -> None:
    """r = pi_theta / pi_rollout. ppo, gspo: no weight. reinforce: a weight of the current policy. cispo: that, or its clipped r."""
    config = CorrectionConfig(method="none" if loss.clips_ratio else method, mode="bypass")
    # The weight takes the place of cispo's clipped r.
    base = "current" if loss.name == "cispo" and method != "none" else "rollout"
    check(rows, config, loss, base, lambda token: reference.weight(replace(token, train=token.current), config))


def check(rows: list[list[Token]], config: CorrectionConfig, loss: LossConfig, base: str, weight) -> None:
    value, leaf, sums = run(rows, config, loss)
    value.backward()
    total = 0.0
    for index, row in enumerate(rows):
        places = [place for place, token in enumerate(row) if valid(token, config)]
        logs = reference.log_ratios([row[place] for place in places], base, loss)
        expected = {place: reference.token_loss(row[place], weight(row[place]), log, loss) for place, log in zip(places, logs, strict=True)}
        total += math.fsum(amount for amount, _ in expected.values())
        gradient = leaf.grad[index].tolist()
        assert all(gradient[place] == 0 for place in range(len(gradient)) if place not in expected)
        for place, log in zip(places, logs, strict=True):
            if not near_kink(log, row[place].advantage, loss):
                assert gradient[place] == pytest.approx(expected[place][1], rel=1e-6, abs=1e-9)
    assert value.item() == pytest.approx(total, rel=1e-6, abs=1e-6)
    assert sums.sums["objective/pg_loss"].item() == pytest.approx(total, rel=1e-6, abs=1e-6)


def valid(token: Token, config: CorrectionConfig) -> bool:
    return reference.is_valid(replace(token, train=token.current) if config.mode == "bypass" else token)


ROWS = [
    [Token(-1.0, -1.2, True, -0.9, 1.0), Token(-0.5, -2.5, True, -0.4, 1.0), Token(-0.01, -0.3, True, -0.02, -2.0)],
    [Token(math.nan, math.nan, False, math.nan, math.nan), Token(-2.0, -1.8, True, -2.2, 0.5)],
]
MODES = [
    (CorrectionConfig(mode=mode, method=method), LossConfig(name=loss))
    for mode in ("recompute", "bypass")
    for method in METHODS
    for loss in ("reinforce", "ppo", "gspo", "cispo")
    if mode == "recompute" or loss not in ("ppo", "gspo") or method == "none"
]


@pytest.mark.parametrize(("correction", "loss"), MODES)
def test_nothing_to_learn_from_gives_0_with_its_graph(correction: CorrectionConfig, loss: LossConfig) -> None:
    """A micro-batch that is all padding, or whose tokens are all dropped, still runs backward on every rank."""
    rows = [[replace(token, sampled=False, current=math.nan, advantage=math.inf) for token in row] for row in ROWS]
    dropped = [[Token(-math.inf, -1.0, True, -math.inf, 1.0)] * 3]
    for nothing in (rows, dropped):
        entropy = padded(nothing, "current").requires_grad_()
        value, leaf, sums = run(nothing, correction, loss.model_copy(update={"entropy_coeff": 0.1}), entropy=entropy)
        value.backward()
        assert value.item() == 0 and leaf.grad.eq(0).all() and entropy.grad.eq(0).all()
        metrics = summarise(sums)
        expected = 3 if nothing is dropped else 0
        assert metrics["objective/tokens"] == metrics["objective/nonfinite_tokens"] == expected
        assert all(number == 0 for name, number in metrics.items() if "tokens" not in name and "share" not in name), metrics


@pytest.mark.parametrize(("correction", "loss"), MODES)
def test_sums_over_uneven_micro_batches_equal_the_whole(correction: CorrectionConfig, loss: LossConfig) -> None:
    """Sums, not means: rows of 3, 1 and 0 sampled tokens add up to the batch, in value, gradient and every metric."""
    rows = [*ROWS, [Token(-1.0, -1.0, False)]]
    whole, leaf, sums = run(rows, correction, loss)
    whole.backward()
    parts, gradients, added = 0.0, [], MetricSums()
    for row in rows:
        value, part_leaf, part_sums = run([row], correction, loss)
        value.backward()
        parts, added = parts + value.item(), added + part_sums
        gradients.append(part_leaf.grad[0, : len(row)])
    assert parts == pytest.approx(whole.item(), rel=1e-12)
    for index, gradient in enumerate(gradients):
        assert torch.equal(leaf.grad[index, : len(gradient)], gradient)
    metrics, expected = summarise(added), summarise(sums)
    assert metrics.keys() == expected.keys()
    assert metrics == {name: pytest.approx(value, rel=1e-9, abs=1e-12) for name, value in expected.items()}


def test_a_dropped_token_leaves_the_others_as_they_are() -> None:
    """The denominator is the trainer's: dropping a token must not rescale what is left."""
    correction, loss = CorrectionConfig(), LossConfig(name="ppo")
    value, leaf, _ = run(ROWS, correction, loss)
    value.backward()
    broken = [[ROWS[0][0], replace(ROWS[0][1], train=-math.inf), ROWS[0][2]], ROWS[1]]
    value, other, sums = run(broken, correction, loss)
    value.backward()
    assert other.grad[0, 1] == 0
    assert torch.equal(other.grad[0, [0, 2]], leaf.grad[0, [0, 2]]) and torch.equal(other.grad[1], leaf.grad[1])
    assert summarise(sums)["objective/tokens"] == 4


@pytest.mark.parametrize(("correction", "loss"), MODES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", ["train", "rollout", "current"])
def test_a_non_finite_log_prob_poisons_nothing(correction: CorrectionConfig, loss: LossConfig, bad: float, field: str) -> None:
    """Whichever log-prob is broken, the token is dropped; bypass mode does not look at the old policy."""
    token, other = replace(ROWS[0][0], advantage=-1.0), ROWS[0][2]
    value, leaf, sums = run([[replace(token, **{field: bad}), other]], correction, loss)
    value.backward()
    unread = field == "train" and correction.mode == "bypass"
    rest, _, _ = run([[other, *([token] if unread else [])]], correction, loss)
    assert value.item() == pytest.approx(rest.item(), rel=1e-12)
    assert leaf.grad.isfinite().all() and (leaf.grad[0, 0] != 0) == unread
    metrics = summarise(sums)
    assert metrics["objective/nonfinite_tokens"] == (not unread)
    assert all(map(math.isfinite, metrics.values()))


def test_pg_loss_is_the_mean_over_the_mask() -> None:
    value, _, sums = run(ROWS, CorrectionConfig(), LossConfig())
    assert summarise(sums)["actor/pg_loss"] == pytest.approx(value.item() / 4)


def test_entropy_bonus_is_neither_weighted_nor_dropped() -> None:
    """A correction scales the policy term alone: a token of weight 0 keeps its whole entropy term."""
    rows = [[Token(-1.0, -1.0, True, -1.0, 1.0), Token(-1.0, math.nan, True, -1.0, 1.0), Token(-1.0, -1.0, False)]]
    entropy = torch.tensor([[0.7, 0.9, 5.0, math.nan]], dtype=torch.float64, requires_grad=True)
    for correction in (CorrectionConfig(), CorrectionConfig(mode="bypass")):
        plain, _, _ = run(rows, correction, LossConfig())
        value, _, sums = run(rows, correction, LossConfig(entropy_coeff=0.5), entropy=entropy)
        assert value.item() == pytest.approx(plain.item() - 0.5 * (0.7 + 0.9))
        (gradient,) = torch.autograd.grad(value, entropy)
        assert gradient.tolist() == [[-0.5, -0.5, 0, 0]]
        assert summarise(sums)["actor/entropy"] == pytest.approx(0.8)


def test_entropy_is_measured_without_a_bonus() -> None:
    entropy = torch.full((2, 4), 0.3, dtype=torch.float64)
    value, _, sums = run(ROWS, CorrectionConfig(), LossConfig(), entropy=entropy)
    assert value.item() == run(ROWS, CorrectionConfig(), LossConfig())[0].item()
    assert summarise(sums)["actor/entropy"] == pytest.approx(0.3)


@pytest.mark.parametrize("method", METHODS)
def test_bypass_weights_follow_the_current_policy_without_gradient(method: str) -> None:
    """d/dlogp of -A sg(f) logp is -A f: no derivative of f, and f of pi_theta rather than of pi_old."""
    config = CorrectionConfig(method=method, mode="bypass")
    value, leaf, sums = run(ROWS, config, LossConfig())
    value.backward()
    current, rollout, mask = padded(ROWS, "current"), padded(ROWS, "rollout"), padded_mask(ROWS)
    weights = correct(current, rollout, mask, config).weights
    assert leaf.grad[0, :3].tolist() == pytest.approx((-padded(ROWS, "advantage") * weights)[0, :3].tolist())
    metrics = summarise(sums)
    assert metrics["rollout_corr/weight_max"] == pytest.approx(weights.max().item())
    assert metrics["rollout_corr/kl"] == pytest.approx((rollout - current)[mask].mean().item())
    assert metrics["rollout_corr/sequences"] == 2


@pytest.mark.parametrize(("correction", "loss"), MODES)
def test_only_the_current_policy_gets_a_gradient(correction: CorrectionConfig, loss: LossConfig) -> None:
    names = ["rollout_logprobs", "advantages"] + (["old_logprobs", "weights"] if correction.mode == "recompute" else [])
    others = {name: torch.full((2, 4), -0.5, dtype=torch.float64, requires_grad=True) for name in names}
    value, leaf, sums = run(ROWS, correction, loss, **others)
    value.backward()
    assert leaf.grad.any() and all(other.grad is None for other in others.values())
    assert not any(total.requires_grad for total in (*sums.sums.values(), *sums.maxima.values()))


def test_recompute_leaves_the_correction_to_the_rollout_batch() -> None:
    _, _, sums = run(ROWS, CorrectionConfig(), LossConfig())
    assert not any(name.startswith("rollout_corr/") for name in summarise(sums))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_low_precision_inputs_are_widened(dtype: torch.dtype) -> None:
    """In bf16 the sum of 257 ones and a half would be 256 or 258."""
    logprobs, ones = torch.full((1, 257), -1.0, dtype=dtype), torch.ones(1, 257, dtype=dtype)
    logprobs[0, 0] = -1.5
    leaf = logprobs.clone().requires_grad_()
    value, _ = token_objective(
        leaf,
        ones,
        old_logprobs=logprobs,
        rollout_logprobs=logprobs,
        advantages=ones,
        mask=ones.bool(),
        weights=ones,
        correction=CorrectionConfig(),
        loss=LossConfig(),
    )
    assert value.dtype == torch.float32 and value.item() == 257.5
    value.backward()
    assert leaf.grad.dtype == dtype and leaf.grad.eq(-1).all()


def test_reference_kl_is_neither_weighted_nor_dropped_by_a_rule() -> None:
    """A token of weight 0 keeps its whole KL term; one whose reference is broken loses that term alone."""
    rows = [[Token(-1.0, -1.0, True, -1.0, 1.0), Token(-1.0, math.nan, True, -1.0, 1.0), Token(-2.0, -1.0, True, -2.0, 1.0)]]
    reference_logprobs = torch.tensor([[-1.5, -1.25, math.nan, math.nan]], dtype=torch.float64)
    for mode in ("recompute", "bypass"):
        correction = CorrectionConfig(mode=mode)
        plain, plain_leaf, _ = run(rows, correction, LossConfig())
        loss = LossConfig(kl_coeff=0.1, kl_estimator="k2")
        value, leaf, sums = run(rows, correction, loss, reference_logprobs=reference_logprobs)
        assert value.item() == pytest.approx(plain.item() + 0.1 * (0.5**2 + 0.25**2) / 2)
        (found,), (before,) = torch.autograd.grad(value, leaf), torch.autograd.grad(plain, plain_leaf)
        assert (found - before).tolist()[0] == pytest.approx([0.05, 0.025, 0, 0])
        assert summarise(sums)["actor/kl_loss"] == pytest.approx((0.5**2 + 0.25**2) / 2 / 3)


def test_coefficients_scale_every_term() -> None:
    rows = [[Token(-1.0, -1.0, True, -1.0, 1.0), Token(-1.0, -1.0, True, -1.0, 3.0)]]
    entropy, reference_logprobs = torch.full((1, 3), 0.5).double(), torch.full((1, 3), -3.0).double()
    loss = LossConfig(entropy_coeff=0.1, kl_coeff=0.2, kl_estimator="k1")
    more = {"entropy": entropy, "reference_logprobs": reference_logprobs, "coefficients": torch.tensor([[0.5, 0.25, 9.0]]).double()}
    value, leaf, _ = run(rows, CorrectionConfig(), loss, **more)
    assert value.item() == pytest.approx(0.5 * (1 + 0.4 - 0.05) + 0.25 * (3 + 0.4 - 0.05))
    (gradient,) = torch.autograd.grad(value, leaf)
    assert gradient.tolist()[0] == pytest.approx([0.5 * (-1 + 0.2), 0.25 * (-3 + 0.2), 0])


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum"])
@pytest.mark.parametrize("loss_name", ["reinforce", "ppo", "gspo", "cispo"])
def test_four_minibatches_of_one_rollout_in_float64(loss_name: str, aggregation: str) -> None:
    """Weights fixed before the first optimizer step, r moves with each: every gradient is autograd's of the written formula."""
    generator = torch.Generator().manual_seed(4)
    rollout, old, moved = (-2 * torch.rand(8, 6, generator=generator, dtype=torch.float64) for _ in range(3))
    advantages = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    mask = torch.rand(8, 6, generator=generator) > 0.2
    loss = LossConfig(name=loss_name, aggregation=aggregation, length_norm=6.0 if aggregation.endswith("sum") else None)
    correction = CorrectionConfig(reject=[{"rule": "k3", "high": 0.5}])
    fixed = correct(old, rollout, mask, correction)
    assert 0 < fixed.keep.sum() < mask.sum()
    coefficients = token_coefficients(mask, loss)
    theta = torch.zeros((), dtype=torch.float64, requires_grad=True)
    for step in range(4):
        rows = slice(2 * step, 2 * step + 2)
        denominator = denominator_parts(mask, loss)[rows].sum()
        current = (old + theta * moved)[rows]
        value, _ = token_objective(
            current,
            None,
            old_logprobs=old[rows],
            rollout_logprobs=rollout[rows],
            advantages=advantages[rows],
            mask=mask[rows],
            weights=fixed.weights[rows],
            coefficients=coefficients[rows],
            correction=correction,
            loss=loss,
        )
        (found,) = torch.autograd.grad(value / denominator, theta)
        expected = written(theta, old[rows], rollout[rows], moved[rows], advantages[rows], mask[rows], fixed.keep[rows], loss)
        assert found.item() == pytest.approx(torch.autograd.grad(expected, theta)[0].item(), rel=1e-6, abs=1e-7)
        theta = (theta - 0.05 * found).detach().requires_grad_()
    assert theta.item() != 0


def written(theta, old, rollout, moved, advantages, mask, keep, loss):
    """The step's loss as the formulas have it, one token at a time; cis weights."""
    total, tokens, sequences = 0.0, 0, 0
    for i in range(len(old)):
        places = [t for t in range(old.shape[1]) if mask[i, t]]
        current = {t: old[i, t] + theta * moved[i, t] for t in places}
        mean = sum(current[t].detach() - old[i, t] for t in places) / max(1, len(places))
        amounts = []
        for t in places:
            k, p = torch.exp(old[i, t] - rollout[i, t]), torch.exp(old[i, t])
            weight = torch.minimum(k, 1 + 2.3 * torch.clamp(1 - p, min=5e-3)) * keep[i, t]
            a, r = advantages[i, t], torch.exp(current[t] - old[i, t])
            if loss.name == "reinforce":
                amounts.append(-weight * a * current[t])
            elif loss.name == "cispo":
                amounts.append(-weight * a * r.detach().clamp(max=5) * current[t])
            else:
                if loss.name == "gspo":
                    r = torch.exp(mean + current[t] - current[t].detach())
                low, high = {"ppo": (0.8, 1.28), "gspo": (1 - 3e-4, 1 + 4e-4)}[loss.name]
                amounts.append(-weight * torch.minimum(r * a, r.clamp(low, high) * a))
        tokens, sequences = tokens + len(places), sequences + bool(places)
        scale = {"token_mean": 1, "sequence_mean_token_mean": 1 / max(1, len(places)), "sequence_mean_token_sum": 1 / 6}
        total = total + scale[loss.aggregation] * sum(amounts)
    return total / (tokens if loss.aggregation == "token_mean" else sequences)
