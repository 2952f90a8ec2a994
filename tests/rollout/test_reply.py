"""A reply of SGLang becomes a trajectory unaltered, or names the request, the field and the value that is wrong."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_tim.errors import UserError
from megatron_tim.replay.layout import MoELayout
from megatron_tim.rollout.reply import Sample, read_reply
from megatron_tim.rollout.trajectory import Trajectory, WeightVersionSpan
from tests.replay.test_trace import encode

SAMPLE = Sample(prompt_index=7, group=3, prompt_ids=[5, 6], rid="run-3-0")
LAYOUT = MoELayout(num_layers=1, moe_layers=(0,), num_experts=4, topk=2)


def reply() -> dict[str, Any]:
    """Two tokens, as SGLang 0.5.23 answers."""
    return {
        "output_ids": [11, 2],
        "meta_info": {
            "id": "run-3-0",
            "finish_reason": {"type": "stop", "matched": 2},
            "output_token_logprobs": [[-0.5, 11, None], [-1.25, 2, None]],
            "routed_experts": encode(np.array([[[0, 1]], [[2, 3]], [[3, 1]]])),
            "weight_version": "4",
            "weight_versions": [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}],
        },
    }


def read(value: dict[str, Any], layout: MoELayout | None = LAYOUT) -> Trajectory:
    return read_reply(value, SAMPLE, logprob_temperature=0.7, layout=layout, engine="sglang 0.5.23 float32")


def test_reads_every_field() -> None:
    trajectory = read(reply())
    assert trajectory.prompt_ids.tolist() == [5, 6] and trajectory.response_ids.tolist() == [11, 2]
    assert trajectory.rollout_logprobs.tolist() == [-0.5, -1.25] and trajectory.logprob_temperature == 0.7
    assert trajectory.response_mask.all() and trajectory.reward is None
    assert trajectory.routed_experts.tolist() == [[[0, 1]], [[2, 3]], [[3, 1]]]
    assert trajectory.weight_versions == (WeightVersionSpan("3", 0, 1), WeightVersionSpan("4", 1, 2))
    assert (trajectory.prompt_index, trajectory.group, trajectory.rid, trajectory.finish_reason) == (7, 3, "run-3-0", "stop")
    assert read(reply(), layout=None).routed_experts is None


@given(st.lists(st.floats(-100, 0, width=32), min_size=1, max_size=8))
def test_logprobs_are_kept_to_the_bit(logprobs: list[float]) -> None:
    value = reply()
    value["output_ids"] = list(range(len(logprobs)))
    value["meta_info"]["output_token_logprobs"] = [[logprob, token, None] for token, logprob in enumerate(logprobs)]
    value["meta_info"]["weight_versions"] = [{"version": "0", "start": 0, "end": len(logprobs)}]
    assert read(value, layout=None).rollout_logprobs.tobytes() == np.array(logprobs, dtype=np.float32).tobytes()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["meta_info", "id"], "other", "meta_info.id is not the request's"),
        (["output_ids"], [11], "output_token_logprobs has 2 entries for 1 output_ids"),
        (["output_ids"], [11, 3], r"output_token_logprobs\[1\] is of token 2, output_ids has 3"),
        (["meta_info", "output_token_logprobs", 0, 0], None, r"output_token_logprobs\[0\] is None"),
        (["meta_info", "output_token_logprobs", 0, 0], float("nan"), r"output_token_logprobs\[0\] is nan"),
        (["meta_info", "output_token_logprobs", 1, 0], float("-inf"), r"output_token_logprobs\[1\] is -inf"),
        (["meta_info", "output_token_logprobs", 1, 0], 0.001, r"output_token_logprobs\[1\] is 0.001"),
        (["meta_info", "weight_versions"], [{"version": "3", "start": 0, "end": 1}], "weight_versions cover 1 of 2"),
        (["meta_info", "weight_versions"], [], "weight_versions cover 0 of 2"),
        (["meta_info", "weight_versions", 0], {"version": "3"}, "is broken"),
        (["meta_info", "finish_reason"], {"type": "abort", "message": "queue full"}, "finish_reason is abort: queue full"),
        (["meta_info", "finish_reason"], None, "is broken"),
        (["meta_info", "routed_experts"], encode(np.array([[[0, 1]], [[2, 3]]])), "is 2 rows .* need 3 rows"),
        (["meta_info", "routed_experts"], encode(np.array([[[0, 1]], [[2, 9]], [[1, 2]]])), "row 1, layer 0: expert 9"),
        (["meta_info", "routed_experts_dtype"], "float32", "routed_experts_dtype is 'float32'"),
        (["output_ids", 0], 2**40, "is broken"),
    ],
)
def test_refuses(path: list[str | int], value: object, message: str) -> None:
    broken = copy.deepcopy(reply())
    target = broken
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    if path == ["output_ids", 0]:
        broken["meta_info"]["output_token_logprobs"][0][1] = value
    with pytest.raises(UserError, match=message) as caught:
        read(broken)
    assert "run-3-0" in str(caught.value)


@pytest.mark.parametrize("field", ["id", "finish_reason", "output_token_logprobs", "routed_experts", "weight_versions"])
def test_names_a_missing_field(field: str) -> None:
    broken = reply()
    del broken["meta_info"][field]
    with pytest.raises(UserError, match=f"run-3-0 has no '{field}'"):
        read(broken)


SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=3)


@given(st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner), max_leaves=5))
def test_any_json_is_answered_with_a_sentence(value: object) -> None:
    with pytest.raises(UserError, match="run-3-0"):
        read({"output_ids": value, "meta_info": value})
