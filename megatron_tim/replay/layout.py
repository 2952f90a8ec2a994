"""Which layers of a model route tokens to experts, read from its Hugging Face config.json."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_tim.errors import UserError
from megatron_tim.hf_config import read_hf_config


@dataclass(frozen=True)
class MoELayout:
    """The routers of a model: ``moe_layers`` are the 0-based absolute numbers of the layers that have one."""

    num_layers: int
    moe_layers: tuple[int, ...]
    num_experts: int
    topk: int

    @classmethod
    def from_hf(cls, folder: Path | str) -> MoELayout:
        """Reads the layout of the model in ``folder``.

        Raises:
            UserError: config.json is missing, unreadable, or describes a model without routed experts.
        """
        path, config = read_hf_config(folder)
        config = config.get("text_config", config)
        experts_key = next((key for key in ("num_experts", "num_local_experts", "n_routed_experts") if config.get(key)), None)
        if experts_key is None or not config.get("num_experts_per_tok"):
            raise UserError(
                f"{path} describes a model without routed experts (no num_experts, or no num_experts_per_tok), so it has no routes"
                " to record; set rollout.record_routes=false."
            )
        layers, num_experts, topk = (_count(path, config, key) for key in ("num_hidden_layers", experts_key, "num_experts_per_tok"))
        return cls(layers, tuple(layer for layer in range(layers) if _is_moe(config, layer)), num_experts, topk)


def _count(path: Path, config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise UserError(f"{path}: {key} = {value!r} is refused: it must be a whole number of at least 1.")
    return value


def _is_moe(config: dict[str, Any], layer: int) -> bool:
    """The rules of transformers' Qwen2-MoE and Qwen3-MoE (first), and DeepSeek (second)."""
    if "n_routed_experts" in config:
        return layer >= config.get("first_k_dense_replace", 0) and layer % config.get("moe_layer_freq", 1) == 0
    return layer not in (config.get("mlp_only_layers") or ()) and (layer + 1) % (config.get("decoder_sparse_step") or 1) == 0
