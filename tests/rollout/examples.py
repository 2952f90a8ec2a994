"""Trajectories made up for tests."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from megatron_tim.rollout.trajectory import Trajectory, WeightVersionSpan


def make_trajectory(prompt: int = 3, response: int = 4, seed: int = 0, **changes: object) -> Trajectory:
    """A valid trajectory of random content; ``changes`` replace fields."""
    random = np.random.default_rng(seed)
    fields = {
        "prompt_index": seed,
        "group": seed // 2,
        "prompt_ids": random.integers(0, 1000, prompt).astype(np.int32),
        "response_ids": random.integers(0, 1000, response).astype(np.int32),
        "response_mask": np.ones(response, dtype=bool),
        "rollout_logprobs": -random.exponential(size=response).astype(np.float32),
        "logprob_temperature": 1.0,
        "routed_experts": random.integers(0, 8, (prompt + response - 1, 2, 2)).astype(np.uint8),
        "weight_versions": (WeightVersionSpan("0", 0, response),),
        "finish_reason": "stop",
        "rid": f"r-{seed}",
        "engine": "sglang 0.5.23 float32",
        "reward": None,
    }
    return Trajectory(**(fields | changes))


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    """Any valid trajectory: with and without routes and reward, wide expert ids, several weight versions."""
    prompt, response = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    kind = draw(st.sampled_from([None, np.uint8, np.uint16]))
    layers, topk = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    cut = draw(st.integers(0, response - 1))
    logprobs = draw(st.lists(st.floats(-(2.0**99), 0, width=32) | st.just(float("-inf")), min_size=response, max_size=response))
    seed = draw(st.integers(0, 1000))
    random = np.random.default_rng(seed)
    return make_trajectory(
        prompt,
        response,
        seed,
        rollout_logprobs=np.array(logprobs, dtype=np.float32),
        response_mask=random.random(response) < 0.5,
        logprob_temperature=draw(st.floats(0.01, 10)),
        routed_experts=None if kind is None else random.integers(0, np.iinfo(kind).max, (prompt + response - 1, layers, topk), kind, True),
        weight_versions=tuple(WeightVersionSpan(*span) for span in [("old", 0, cut), ("new", cut, response)] if span[2] > span[1]),
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        reward=draw(st.none() | st.floats(-1, 1)),
        rid=draw(st.text(max_size=5)),
    )


def assert_same(first: Trajectory, second: Trajectory) -> None:
    """Every field is equal, arrays in dtype and bits too."""
    for name in Trajectory.__dataclass_fields__:
        one, other = getattr(first, name), getattr(second, name)
        if isinstance(one, np.ndarray):
            assert one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes(), name
        else:
            assert one == other, name
