"""The preflight against the real server: exact enough when healthy, and faults named by their cause."""

import json

import pytest

from megatron_tim.errors import UserError
from megatron_tim.training.preflight import Preflight, preflight_metrics, refuse_other_model
from tests.processes import torchrun


@pytest.fixture(scope="module")
def results(sglang_server, tiny_model, other_tiny_model, tmp_path_factory, monkeypatch_module):
    monkeypatch_module.setenv("MEGATRON_TIM_API_KEY", sglang_server.api_key)
    out = tmp_path_factory.mktemp("preflight") / "results.json"
    torchrun(2, "tests/training/preflight_worker.py", sglang_server.base_url, tiny_model, other_tiny_model, out)
    return {name: Preflight(**values) for name, values in json.loads(out.read_text()).items()}


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.mark.parametrize("case", ["healthy", "healthy at 0.7"])
def test_a_float32_server_agrees_with_the_trainer(results, case):
    result = results[case]
    assert result.passed and result.cause is None
    assert result.tokens > 100
    assert result.max_abs_diff <= 1e-3
    assert result.routing_disagreement == 0
    refuse_other_model(result)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("recorded before temperature", "SGLANG_RETURN_ORIGINAL_LOGPROB"),
        ("one token late", "one token late"),
        ("one token early", "one token early"),
        ("other weights", "holds other weights"),
    ],
)
def test_a_fault_is_refused_with_its_cause(results, case, words):
    assert not results[case].passed
    with pytest.raises(UserError, match=words):
        refuse_other_model(results[case])


def test_other_weights_route_otherwise(results):
    assert results["other weights"].routing_disagreement > 0.1


def test_metrics_are_the_figures(results):
    metrics = preflight_metrics(results["healthy"])
    assert metrics["preflight/max_abs_diff"] == results["healthy"].max_abs_diff
    assert metrics["preflight/routing_disagreement"] == 0 and metrics["preflight/passed"] == 1
    assert all(isinstance(value, float) for value in metrics.values())
