"""Decodes the routes that SGLang returns with a sample into the compact array that replay reads."""

from __future__ import annotations

import base64
import binascii

import numpy as np

from megatron_tim.replay.layout import MoELayout

_WIRE_DTYPES = ("int32", "uint8", "int16", "uint16", "int64")


def decode_routes(payload: str, rows: int, layout: MoELayout, dtype: str = "int32") -> np.ndarray:
    """Decodes ``meta_info.routed_experts``: base64 of little-endian ``[rows, num_layers, topk]``.

    Args:
        payload: the base64 text.
        rows: P+R-1, one row for each token that was an input; the last sampled token never was.
        layout: the model's routers; layers without one are present in the payload, zero-filled, and dropped here.
        dtype: ``meta_info.routed_experts_dtype``, which SGLang leaves out when it is int32.

    Returns:
        ``[rows, moe_layers, topk]``, uint8 for up to 256 experts, else uint16.

    Raises:
        ValueError: the payload is not such an array, an expert is out of range or chosen twice by
            one token, or a dense layer has routes; row, layer (absolute) and value are named.
    """
    experts = _parse(payload, rows, layout, dtype)
    dense = [layer for layer in range(layout.num_layers) if layer not in layout.moe_layers]
    _refuse(experts[:, dense] != 0, dense, experts[:, dense], "routes to experts although the model's config makes that layer dense")
    routes = np.ascontiguousarray(experts[:, layout.moe_layers])
    _refuse((routes < 0) | (routes >= layout.num_experts), layout.moe_layers, routes, f"is not among the {layout.num_experts} experts")
    in_order = np.sort(routes, axis=-1)
    _refuse(in_order[..., 1:] == in_order[..., :-1], layout.moe_layers, in_order, "is chosen twice by one token")
    return routes.astype(np.uint8 if layout.num_experts <= 256 else np.uint16)


def _parse(payload: str, rows: int, layout: MoELayout, dtype: str) -> np.ndarray:
    if dtype not in _WIRE_DTYPES:
        raise ValueError(f"routed_experts_dtype is {dtype!r}, expected one of {', '.join(_WIRE_DTYPES)}")
    try:
        data = base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError, TypeError) as error:
        raise ValueError(f"routed_experts is not base64: {error}") from None
    kind = np.dtype(dtype).newbyteorder("<")
    row_bytes = kind.itemsize * layout.num_layers * layout.topk
    if len(data) != rows * row_bytes:
        raise ValueError(
            f"routed_experts has {len(data)} bytes, that is {len(data) / row_bytes:g} rows of {layout.num_layers} layers x {layout.topk}"
            f" experts in {dtype}; prompt and response need {rows} rows"
        )
    return np.frombuffer(data, dtype=kind).reshape(rows, layout.num_layers, layout.topk)


def _refuse(bad: np.ndarray, layers: list[int] | tuple[int, ...], experts: np.ndarray, reason: str) -> None:
    """Raises for the first True of ``bad`` [rows, layers, ...], naming its row, its absolute layer and the expert there."""
    if bad.any():
        row, layer, column = np.argwhere(bad)[0]
        raise ValueError(f"routed_experts row {row}, layer {layers[layer]}: expert {experts[row, layer, column]} {reason}")
