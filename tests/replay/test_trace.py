"""Decoding SGLang's routes: every valid payload round-trips, every broken one names its row, layer and value."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_tim.errors import UserError
from megatron_tim.replay.layout import MoELayout
from megatron_tim.replay.trace import decode_routes

LAYOUT = MoELayout(num_layers=3, moe_layers=(1, 2), num_experts=8, topk=2)


def encode(experts: np.ndarray, dtype: str = "int32") -> str:
    return base64.b64encode(experts.astype(np.dtype(dtype).newbyteorder("<")).tobytes()).decode()


def valid_experts(rows: int = 5) -> np.ndarray:
    """[rows, 3 layers, 2]: layer 0 is dense."""
    experts = np.zeros((rows, 3, 2), dtype=np.int64)
    experts[:, 1:] = [[[3, 1], [0, 7]]]
    return experts


@st.composite
def routes(draw: st.DrawFn) -> tuple[MoELayout, np.ndarray]:
    layers = draw(st.integers(1, 5))
    moe_layers = tuple(sorted(draw(st.sets(st.integers(0, layers - 1), min_size=1))))
    topk = draw(st.integers(1, 4))
    num_experts = draw(st.integers(topk, 300))
    random = np.random.default_rng(draw(st.integers(0, 1000)))
    chosen = [random.permutation(num_experts)[:topk] for _ in range(draw(st.integers(1, 6)) * len(moe_layers))]
    return MoELayout(layers, moe_layers, num_experts, topk), np.array(chosen).reshape(-1, len(moe_layers), topk)


@given(routes(), st.sampled_from(["int32", "int64", "int16", "uint16"]))
def test_round_trip(case: tuple[MoELayout, np.ndarray], dtype: str) -> None:
    layout, expected = case
    payload = np.zeros((len(expected), layout.num_layers, layout.topk), dtype=np.int64)
    payload[:, layout.moe_layers] = expected
    decoded = decode_routes(encode(payload, dtype), len(expected), layout, dtype)
    assert decoded.dtype == (np.uint8 if layout.num_experts <= 256 else np.uint16)
    assert decoded.flags.c_contiguous
    np.testing.assert_array_equal(decoded, expected)


@given(st.integers(0, 4), st.integers(1, 2), st.integers(0, 1), st.integers(8, 2**31 - 1) | st.integers(-(2**31), -1))
def test_an_expert_out_of_range_is_named(row: int, layer: int, column: int, expert: int) -> None:
    experts = valid_experts()
    experts[row, layer, column] = expert
    with pytest.raises(ValueError, match=f"row {row}, layer {layer}: expert {expert} is not among the 8 experts"):
        decode_routes(encode(experts), 5, LAYOUT)


@given(st.integers(0, 4), st.integers(1, 2), st.integers(0, 7))
def test_a_duplicate_expert_is_named(row: int, layer: int, expert: int) -> None:
    experts = valid_experts()
    experts[row, layer] = expert
    with pytest.raises(ValueError, match=f"row {row}, layer {layer}: expert {expert} is chosen twice"):
        decode_routes(encode(experts), 5, LAYOUT)


def test_a_dense_layer_with_routes_is_named() -> None:
    experts = valid_experts()
    experts[2, 0, 1] = 4
    with pytest.raises(ValueError, match="row 2, layer 0: expert 4 routes to experts although"):
        decode_routes(encode(experts), 5, LAYOUT)


@pytest.mark.parametrize("rows", [4, 6, 0])
def test_the_number_of_rows_must_fit(rows: int) -> None:
    with pytest.raises(ValueError, match=f"is 5 rows of 3 layers x 2 experts in int32; prompt and response need {rows} rows"):
        decode_routes(encode(valid_experts()), rows, LAYOUT)


@given(st.text() | st.binary().map(lambda data: base64.b64encode(data).decode()))
def test_garbage_is_refused_in_a_sentence(payload: str) -> None:
    with pytest.raises(ValueError, match="^routed_experts"):
        decode_routes(payload, 1000, LAYOUT)


def test_another_element_type_is_refused() -> None:
    with pytest.raises(ValueError, match="routed_experts_dtype is 'object', expected one of"):
        decode_routes(encode(valid_experts()), 5, LAYOUT, "object")
    with pytest.raises(ValueError, match="routed_experts is not base64"):
        decode_routes(None, 5, LAYOUT)


QWEN3 = {"num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": []}
DEEPSEEK = {"num_hidden_layers": 4, "n_routed_experts": 64, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "moe_layer_freq": 1}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (QWEN3, MoELayout(4, (0, 1, 2, 3), 8, 2)),
        (QWEN3 | {"decoder_sparse_step": 2, "mlp_only_layers": [3]}, MoELayout(4, (1,), 8, 2)),
        ({**QWEN3, "num_experts": None, "num_local_experts": 16}, MoELayout(4, (0, 1, 2, 3), 16, 2)),
        (DEEPSEEK, MoELayout(4, (1, 2, 3), 64, 6)),
        (DEEPSEEK | {"moe_layer_freq": 2}, MoELayout(4, (2,), 64, 6)),
        (QWEN3 | {"mlp_only_layers": None, "decoder_sparse_step": None}, MoELayout(4, (0, 1, 2, 3), 8, 2)),
        ({"text_config": QWEN3}, MoELayout(4, (0, 1, 2, 3), 8, 2)),
    ],
)
def test_layout_of_a_model(tmp_path: Path, config: dict[str, object], expected: MoELayout) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert MoELayout.from_hf(tmp_path) == expected


def test_layout_refuses_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no config.json"):
        MoELayout.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        MoELayout.from_hf(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 2}))
    with pytest.raises(UserError, match="without routed experts.*set rollout.record_routes=false"):
        MoELayout.from_hf(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | {"num_hidden_layers": "4"}))
    with pytest.raises(UserError, match="num_hidden_layers = '4' is refused"):
        MoELayout.from_hf(tmp_path)
