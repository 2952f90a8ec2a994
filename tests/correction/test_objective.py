import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_tim.correction import CorrectionConfig, LossConfig, MetricSums, correct, summarise, token_objective
from megatron_tim.correction.correct import weigh_tokens
from tests.correction import reference
from tests.correction.batches import Token, examples, padded, padded_mask, sequences

METHODS = ["none", "tis", "cis"]
losses = st.builds(LossConfig, name=st.sampled_from(["reinforce", "ppo"]), clip_low=st.floats(0, 0.5), clip_high=st.floats(0, 0.9))


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
@given(rows=sequences(), method=st.sampled_from(METHODS), loss=losses)
def test_recompute_equals_loops(rows: list[list[Token]], method: str, loss: LossConfig) -> None:
    """Weights of the old policy, fixed; r = pi_theta / pi_old, which is not 1."""
    config = CorrectionConfig(method=method)
    check(rows, config, loss, lambda token: (reference.weight(token, config), token.train), reference.is_valid)


@examples
@given(rows=sequences(), method=st.sampled_from(METHODS), loss=losses)
def test_bypass_equals_loops(rows: list[list[Token]], method: str, loss: LossConfig) -> None:
    """reinforce: weights of the current policy, detached. ppo: r = pi_theta / pi_rollout, and no weight."""
    config = CorrectionConfig(method="none" if loss.name == "ppo" else method, mode="bypass")

    def weight_and_reference(token: Token) -> tuple[float, float]:
        return reference.weight(replace(token, train=token.current), config), token.rollout

    check(rows, config, loss, weight_and_reference, lambda token: reference.is_valid(replace(token, train=token.current)))


def check(rows: list[list[Token]], config: CorrectionConfig, loss: LossConfig, weight_and_reference, valid) -> None:
    value, leaf, sums = run(rows, config, loss)
    value.backward()
    total = 0.0
    for index, row in enumerate(rows):
        for place, token in enumerate(row):
            found = leaf.grad[index, place].item()
            if not valid(token):
                assert found == 0
                continue
            amount, slope = reference.token_loss(token, *weight_and_reference(token), loss)
            total += amount
            if loss.name == "reinforce" or not near_kink(token.current - weight_and_reference(token)[1], token, loss):
                assert found == pytest.approx(slope, rel=1e-6, abs=1e-9)
        assert not leaf.grad[index, len(row) :].any()
    assert value.item() == pytest.approx(total, rel=1e-6, abs=1e-6)
    assert sums.sums["objective/pg_loss"].item() == pytest.approx(total, rel=1e-6, abs=1e-6)


def near_kink(log_ratio: float, token: Token, loss: LossConfig) -> bool:
    return token.advantage == 0 or any(abs(math.exp(log_ratio) - bound) < 1e-9 for bound in (1 - loss.clip_low, 1 + loss.clip_high))


ROWS = [
    [Token(-1.0, -1.2, True, -0.9, 1.0), Token(-0.5, -2.5, True, -0.4, 1.0), Token(-0.01, -0.3, True, -0.02, -2.0)],
    [Token(math.nan, math.nan, False, math.nan, math.nan), Token(-2.0, -1.8, True, -2.2, 0.5)],
]
MODES = [
    (CorrectionConfig(mode=mode, method=method), LossConfig(name=loss))
    for mode in ("recompute", "bypass")
    for method in METHODS
    for loss in ("reinforce", "ppo")
    if (mode, loss) != ("bypass", "ppo") or method == "none"
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
        assert all(number == 0 for name, number in metrics.items() if "tokens" not in name and "share" not in name)


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
    assert metrics == {name: pytest.approx(value, rel=1e-12, abs=1e-15) for name, value in expected.items()}


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
    weights = weigh_tokens(current, rollout, mask, mask, config).weights
    assert leaf.grad[0, :3].tolist() == pytest.approx((-padded(ROWS, "advantage") * weights)[0, :3].tolist())
    metrics = summarise(sums)
    assert metrics["rollout_corr/weight_max"] == pytest.approx(weights.max().item())
    assert metrics["rollout_corr/kl"] == pytest.approx((rollout - current)[mask].mean().item())
    assert "rollout_corr/sequences" not in metrics


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
