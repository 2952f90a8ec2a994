"""What a trajectory refuses."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from megatron_tim.rollout.trajectory import WeightVersionSpan
from tests.rollout.examples import make_trajectory


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_ids": np.zeros(0, np.int32)}, "prompt_ids must be a non-empty int32"),
        ({"prompt_ids": [1, 2, 3]}, "prompt_ids must be .* found list"),
        ({"response_ids": np.zeros(4, np.int64)}, "response_ids must be .* found int64"),
        ({"response_ids": np.array([1, 2, -3, 4], np.int32)}, "response_ids holds a negative token id: -3"),
        ({"response_mask": np.ones(4, np.uint8)}, "response_mask must be .* bool"),
        ({"response_mask": np.ones(3, bool)}, "response_mask has 3 entries for 4 response_ids"),
        ({"rollout_logprobs": np.zeros(5, np.float32)}, "rollout_logprobs has 5 entries for 4 response_ids"),
        ({"rollout_logprobs": np.zeros(4, np.float16)}, "rollout_logprobs must be .* float32"),
        ({"rollout_logprobs": np.zeros((4, 1), np.float32)}, "one dimension"),
        ({"logprob_temperature": 0.0}, "logprob_temperature must be positive"),
        ({"logprob_temperature": float("nan")}, "logprob_temperature must be positive"),
        ({"routed_experts": np.zeros((7, 2, 2), np.uint8)}, "routed_experts has 7 rows, prompt and response need 6"),
        ({"routed_experts": np.zeros((6, 2, 2), np.int32)}, "routed_experts must be a uint8 or uint16"),
        ({"routed_experts": np.zeros((6, 4), np.uint8)}, "three dimensions"),
        ({"weight_versions": ()}, "weight_versions cover 0 of 4"),
        ({"weight_versions": (WeightVersionSpan("0", 0, 3),)}, "weight_versions cover 3 of 4"),
        ({"weight_versions": (WeightVersionSpan("0", 0, 1), WeightVersionSpan("1", 2, 4))}, "not contiguous"),
        ({"weight_versions": (WeightVersionSpan("0", 0, 4), WeightVersionSpan("1", 4, 4))}, "not contiguous"),
    ],
)
def test_refuses(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_trajectory(**changes)


def test_reward_is_added_by_replacing() -> None:
    trajectory = make_trajectory()
    assert dataclasses.replace(trajectory, reward=0.5).reward == 0.5
    with pytest.raises(dataclasses.FrozenInstanceError):
        trajectory.reward = 1.0
