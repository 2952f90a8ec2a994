import itertools
import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron_tim.correction import CorrectionConfig, Method, RejectionRule, correct
from megatron_tim.correction.config import SEQUENCE_METHODS
from megatron_tim.correction.weights import TOKEN_WEIGHTS
from tests.correction import reference
from tests.correction.batches import Token, cu_seqlens, examples, packed, packed_mask, padded, padded_mask, sequences

NAN, INF = math.nan, math.inf
METHODS = sorted(TOKEN_WEIGHTS)


@st.composite
def rules(draw: st.DrawFn) -> RejectionRule:
    """Any statistic at any level, with asymmetric bounds that reject some and keep some."""
    name, level = draw(st.sampled_from(["k1", "k2", "k3", "ratio"])), draw(st.sampled_from(LEVELS))
    bounds = {"k1": (-0.4, 0.7), "k2": (0.001, 0.3), "k3": (0.001, 0.4), "ratio": (0.6, 1.9)}[name]
    low, high = draw(st.sampled_from([bounds, (bounds[0], None), (None, bounds[1])]))
    return RejectionRule(statistic=name, level=level, low=low, high=high)


LEVELS = ["token", "sequence_sum", "sequence_mean", "sequence_max"]
methods = {
    "method": st.sampled_from([*METHODS, "seq_tis", "seq_mis"]),
    "lam": st.floats(0, 5),
    "kappa": st.sampled_from([0.0, 5e-3, 0.1]),
    "cap": st.floats(0.3, 4),
    "low": st.sampled_from([None, 0.3, 0.9]),
    "high": st.sampled_from([None, 1.1, 3.0]),
    "phi": st.floats(0.01, 2),
    "sequence_cap": st.floats(0.3, 4),
    "length_normalised": st.booleans(),
    "reject": st.lists(rules(), max_size=3, unique_by=lambda rule: rule.name),
}


@st.composite
def configs(draw: st.DrawFn) -> CorrectionConfig:
    values = {name: draw(strategy) for name, strategy in methods.items()}
    if values["method"] not in SEQUENCE_METHODS:
        values["sequence"] = draw(st.sampled_from(["none", *SEQUENCE_METHODS]))
    shadow = {name: draw(strategy) for name, strategy in methods.items()}
    return CorrectionConfig(**values, shadows={"other": shadow})


@examples
@given(rows=sequences(), config=configs())
def test_padded_equals_loops(rows: list[list[Token]], config: CorrectionConfig) -> None:
    assume(clear_of_edges(rows, config))
    out = correct(padded(rows, "train"), padded(rows, "rollout"), padded_mask(rows), config)
    width = max(map(len, rows)) + 1
    for index, (row, expected) in enumerate(zip(rows, reference.weigh(rows, config), strict=True)):
        check_tokens(out.weights[index, : len(row)], out.keep[index, : len(row)], expected)
        assert not out.keep[index, len(row) :].any() and out.weights[index, len(row) :].tolist() == [0] * (width - len(row))
    check_metrics(out.metrics, rows, config)


@examples
@given(rows=sequences(), config=configs())
def test_packed_equals_loops(rows: list[list[Token]], config: CorrectionConfig) -> None:
    assume(clear_of_edges(rows, config))
    out = correct(packed(rows, "train"), packed(rows, "rollout"), packed_mask(rows), config, cu_seqlens(rows))
    check_tokens(out.weights, out.keep, list(itertools.chain(*reference.weigh(rows, config))))
    check_metrics(out.metrics, rows, config)


def clear_of_edges(rows: list[list[Token]], config: CorrectionConfig) -> bool:
    """Whether no threshold is so close that rounding decides on which side of it a value is."""
    return not any(near_an_edge(rows, method) for method in (config, *config.shadows.values()))


def near_an_edge(rows: list[list[Token]], config: Method) -> bool:
    distances = [distance for row in rows for rule in config.reject for distance in reference.edges(row, rule)]
    for row in rows:
        distances.append(abs(reference.sequence_ratio(row, config) / config.sequence_cap - 1))
        for token in filter(reference.is_valid, row):
            k = math.exp(reference.bound(token.train - token.rollout))
            cap = 1 + config.lam * max(1 - math.exp(token.train), config.kappa)
            distances += [abs(k / edge - 1) for edge in (config.cap, 1 / config.cap, cap, *config.bounds)]
            distances += [abs(divergence - config.phi) for divergence in reference.kpop_divergences(token)]
            distances += [abs(math.exp(token.train) - edge) for edge in (0.5, 0.9, 0.99, 0.999)]
    return min(distances, default=1) < 1e-11


def check_tokens(weights: torch.Tensor, keep: torch.Tensor, expected: list[reference.Weighed | None]) -> None:
    assert keep.tolist() == [item is not None and not item.rejected_by for item in expected]
    values = [item.weight if item and not item.rejected_by else 0.0 for item in expected]
    assert weights.tolist() == pytest.approx(values, rel=1e-6)


def check_metrics(metrics: dict[str, float], rows: list[list[Token]], config: CorrectionConfig) -> None:
    expected = reference.correction_metrics(rows, config)
    expected |= {f"rollout_corr/{name}": value for name, value in reference.bias_metrics(rows, config).items()}
    exact = reference.bias_metrics(rows, CorrectionConfig(method="exact"))
    expected |= {f"rollout_corr/exact/{name}": value for name, value in exact.items()}
    for name, method in config.shadows.items():
        found = reference.weight_metrics(rows, method) | reference.bias_metrics(rows, method)
        expected |= {f"shadow/{name}/{key}": value for key, value in found.items()}
    assert {name for name in metrics if not name.startswith("displacement/")} == expected.keys()
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-6, abs=1e-7), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_fp32_and_computed_in_fp32_or_better(dtype: torch.dtype) -> None:
    train, rollout = torch.tensor([[-0.3, -1.7]], dtype=dtype), torch.tensor([[-0.31, -1.6]], dtype=dtype)
    out = correct(train, rollout, torch.ones(1, 2, dtype=torch.bool), CorrectionConfig(method="tis"))
    assert out.weights.dtype == torch.float32
    expected = (train.double() - rollout.double()).exp()
    assert out.weights.tolist()[0] == pytest.approx(expected.tolist()[0], rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_cap_is_computed_in_fp32_or_better(dtype: torch.dtype) -> None:
    train, rollout = torch.tensor([[-0.3]], dtype=dtype), torch.tensor([[-9.0]], dtype=dtype)
    weight = correct(train, rollout, torch.tensor([[True]]), CorrectionConfig()).weights.item()
    assert weight == pytest.approx(1 - 2.3 * math.expm1(train.item()), rel=1e-6)


def test_one_side_in_fp64_is_not_rounded() -> None:
    train, rollout = torch.tensor([[-1.0]]), torch.tensor([[-1.0 - 1e-10]], dtype=torch.float64)
    assert correct(train, rollout, torch.tensor([[True]]), CorrectionConfig()).metrics["rollout_corr/kl"] == pytest.approx(-1e-10, rel=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_no_gradient_through_weights_or_metrics(method: str) -> None:
    train = torch.tensor([[-0.3, -1.7]], requires_grad=True)
    rollout = torch.tensor([[-0.4, -1.5]], requires_grad=True)
    out = correct(train, rollout, torch.tensor([[True, True]]), CorrectionConfig(method=method))
    assert not out.weights.requires_grad
    assert not any(value.requires_grad for value in (*out.sums.sums.values(), *out.sums.maxima.values()))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("side", ["train", "rollout"])
def test_non_finite_is_dropped_counted_and_never_weight_1(method: str, bad: float, side: str) -> None:
    logprobs = {"train": torch.tensor([[-0.3, -0.5, -0.7]]), "rollout": torch.tensor([[-0.3, -0.5, -0.7]])}
    logprobs[side][0, 1] = bad
    out = correct(logprobs["train"], logprobs["rollout"], torch.tensor([[True] * 3]), CorrectionConfig(method=method))
    assert out.weights.tolist() == [[1, 0, 1]] and out.keep.tolist() == [[True, False, True]]
    assert out.metrics["rollout_corr/tokens"] == 3
    assert out.metrics["rollout_corr/nonfinite_tokens"] == 1
    assert out.metrics["rollout_corr/nonfinite_share"] == pytest.approx(1 / 3)
    assert out.metrics["rollout_corr/rollout_is_mean"] == 1


@pytest.mark.parametrize("sampled", [True, False])
def test_nothing_left_gives_zeros(sampled: bool) -> None:
    """All dropped, or nothing sampled at all: counts, and 0 for everything else."""
    train = torch.full((2, 3), NAN)
    out = correct(train, train, torch.full((2, 3), sampled), CorrectionConfig())
    expected = {"rollout_corr/tokens": 6, "rollout_corr/nonfinite_tokens": 6, "rollout_corr/nonfinite_share": 1} if sampled else {}
    assert out.metrics == {name: expected.get(name, 0) for name in out.metrics}
    assert out.weights.tolist() == [[0] * 3] * 2


def test_empty_batches() -> None:
    for shape, offsets in [((0, 4), None), ((3, 0), None), ((0,), torch.tensor([0])), ((0,), torch.tensor([0, 0]))]:
        nothing = torch.zeros(shape)
        out = correct(nothing, nothing, nothing.bool(), CorrectionConfig(), offsets)
        assert out.weights.shape == nothing.shape and set(out.metrics.values()) == {0}


def test_metrics_see_the_ratio_before_it_is_truncated() -> None:
    train, rollout = torch.tensor([[-0.1, -0.1]]), torch.tensor([[-3.0, -0.1]])
    metrics = correct(train, rollout, torch.tensor([[True, True]]), CorrectionConfig(method="tis")).metrics
    assert metrics["rollout_corr/rollout_is_max"] == pytest.approx(math.exp(2.9))
    assert metrics["rollout_corr/rollout_is_ratio_fraction_high"] == 0.5
    assert metrics["rollout_corr/weight_max"] == 2
    assert metrics["rollout_corr/capped_share"] == 0.5


def test_a_ratio_on_the_threshold_is_neither_high_nor_low() -> None:
    same = torch.tensor([[-0.5]])
    metrics = correct(same, same, torch.tensor([[True]]), CorrectionConfig(method="tis", cap=1)).metrics
    assert metrics["rollout_corr/rollout_is_ratio_fraction_high"] == metrics["rollout_corr/rollout_is_ratio_fraction_low"] == 0


def test_packed_sequences_are_not_mixed() -> None:
    """Two sequences whose ratios cancel each other, packed: each still has its own product."""
    train, rollout = torch.tensor([-1.0, -1.0]), torch.tensor([-1.5, -0.5])
    metrics = correct(train, rollout, torch.tensor([True, True]), CorrectionConfig(), torch.tensor([0, 1, 2])).metrics
    assert metrics["rollout_corr/chi2_seq"] == pytest.approx((math.exp(1) + math.exp(-1)) / 2 - 1)
    assert metrics["rollout_corr/log_ppl_diff_max"] == 0.5 and metrics["rollout_corr/log_ppl_diff_min"] == -0.5


def test_absurd_but_finite_log_probs_give_finite_metrics() -> None:
    train, rollout = torch.tensor([[-1e38, -0.5]]), torch.tensor([[-0.5, -1e38]])
    out = correct(train, rollout, torch.tensor([[True, True]]), CorrectionConfig())
    assert all(map(math.isfinite, out.metrics.values()))
    assert out.metrics["rollout_corr/rollout_is_max"] == pytest.approx(math.exp(20))
    assert out.metrics["rollout_corr/rollout_is_min"] == 0
    assert out.metrics["rollout_corr/training_ppl"] == pytest.approx(math.exp(88))
    assert out.weights.tolist()[0] == pytest.approx([0, 1 + 2.3 * (1 - math.exp(-0.5))])


def test_a_long_drift_keeps_the_sequence_metrics_finite() -> None:
    """600 tokens that each gain 0.5 nats: the product is e^300, held at e^20."""
    train, mask = torch.full((2, 600), -0.5), torch.ones(2, 600, dtype=torch.bool)
    train[1] = -1.5
    metrics = correct(train, torch.full((2, 600), -1.0), mask, CorrectionConfig()).metrics
    assert metrics["rollout_corr/chi2_seq"] == pytest.approx(math.exp(40) / 2)


def test_weights_that_all_vanish_have_no_effective_sample() -> None:
    train, rollout = torch.full((1, 2), -1e3), torch.full((1, 2), -1.0)
    metrics = correct(train, rollout, torch.tensor([[True, True]]), CorrectionConfig()).metrics
    assert metrics["rollout_corr/weight_mean"] == metrics["rollout_corr/weight_eff_sample_size"] == 0


def test_rounding_above_0_is_a_sure_token() -> None:
    train, rollout = torch.tensor([[2e-7]]), torch.tensor([[-1.0]])
    assert correct(train, rollout, torch.tensor([[True]]), CorrectionConfig()).weights.item() == pytest.approx(1.0115)
