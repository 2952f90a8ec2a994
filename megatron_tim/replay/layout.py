"""Which layers of a model route tokens to experts, read from its Hugging Face config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_tim.errors import UserError


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
        path = Path(folder) / "config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(f"{path} does not exist; give the folder of a Hugging Face model.") from None
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read: {' '.join(str(error).split())}.") from None
        config = config.get("text_config", config)
        num_experts = next((config[key] for key in ("num_experts", "num_local_experts", "n_routed_experts") if config.get(key)), None)
        layers, topk = config.get("num_hidden_layers"), config.get("num_experts_per_tok")
        if not (layers and num_experts and topk):
            raise UserError(f"{path} describes a model without routed experts, so it has no routes to record; turn replay off.")
        return cls(layers, tuple(layer for layer in range(layers) if _is_moe(config, layer)), num_experts, topk)


def _is_moe(config: dict[str, Any], layer: int) -> bool:
    """The rules of transformers' Qwen2-MoE and Qwen3-MoE (first), and DeepSeek (second)."""
    if "n_routed_experts" in config:
        return layer >= config.get("first_k_dense_replace", 0) and layer % config.get("moe_layer_freq", 1) == 0
    return layer not in (config.get("mlp_only_layers") or ()) and (layer + 1) % (config.get("decoder_sparse_step") or 1) == 0
