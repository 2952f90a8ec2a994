"""Which Hugging Face tensors each Megatron parameter is made of, and how: pure layout, no I/O.

Qwen3-MoE, Megatron's local layer spec. A parameter is one HF tensor (``copy``), the interleaving of
query, key and value by key-value head (``qkv``), or gate stacked on up projection (``glu``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from megatron_tim.megatron.architecture import Architecture


@dataclass(frozen=True)
class ParameterMap:
    """One Megatron parameter and the HF tensors it holds.

    ``tensor_dim`` is the dimension that tensor parallelism splits (None: replicated); ``is_expert``
    says whose groups split and replicate it.
    """

    parameter: torch.nn.Parameter
    kind: str
    hf_names: tuple[str, ...]
    tensor_dim: int | None = None
    is_expert: bool = False


def parameter_maps(model: GPTModel, arch: Architecture) -> Iterator[ParameterMap]:
    """Every parameter that this rank's chunk holds, with absolute layer and expert numbers."""
    if model.pre_process:
        yield ParameterMap(model.embedding.word_embeddings.weight, "copy", ("model.embed_tokens.weight",), 0)
    for layer in model.decoder.layers:
        yield from _layer_maps(layer, f"model.layers.{layer.layer_number - 1}.")
    if model.post_process:
        yield ParameterMap(model.decoder.final_layernorm.weight, "copy", ("model.norm.weight",))
        if not arch.tie_word_embeddings:
            yield ParameterMap(model.output_layer.weight, "copy", ("lm_head.weight",), 0)


def _layer_maps(layer: torch.nn.Module, prefix: str) -> Iterator[ParameterMap]:
    attention = layer.self_attention
    yield ParameterMap(layer.input_layernorm.weight, "copy", (prefix + "input_layernorm.weight",))
    yield ParameterMap(attention.linear_qkv.weight, "qkv", tuple(f"{prefix}self_attn.{x}_proj.weight" for x in "qkv"), 0)
    yield ParameterMap(attention.q_layernorm.weight, "copy", (prefix + "self_attn.q_norm.weight",))
    yield ParameterMap(attention.k_layernorm.weight, "copy", (prefix + "self_attn.k_norm.weight",))
    yield ParameterMap(attention.linear_proj.weight, "copy", (prefix + "self_attn.o_proj.weight",), 1)
    yield ParameterMap(layer.pre_mlp_layernorm.weight, "copy", (prefix + "post_attention_layernorm.weight",))
    if not hasattr(layer.mlp, "router"):
        yield from _mlp_maps(layer.mlp, prefix + "mlp.", is_expert=False)
        return
    yield ParameterMap(layer.mlp.router.weight, "copy", (prefix + "mlp.gate.weight",))
    for number, expert in zip(layer.mlp.local_expert_indices, layer.mlp.experts.local_experts, strict=True):
        yield from _mlp_maps(expert, f"{prefix}mlp.experts.{number}.", is_expert=True)


def _mlp_maps(mlp: torch.nn.Module, prefix: str, is_expert: bool) -> Iterator[ParameterMap]:
    yield ParameterMap(mlp.linear_fc1.weight, "glu", (prefix + "gate_proj.weight", prefix + "up_proj.weight"), 0, is_expert)
    yield ParameterMap(mlp.linear_fc2.weight, "copy", (prefix + "down_proj.weight",), 1, is_expert)


def shard(entry: ParameterMap, hf: list[Tensor], arch: Architecture, size: int, rank: int) -> Tensor:
    """This rank's slice of a parameter (rank ``rank`` of ``size`` that split it), from whole HF tensors."""
    if entry.kind == "glu":
        # Each rank holds its slice of gate and its slice of up, so split first.
        return torch.cat([tensor.chunk(size, 0)[rank] for tensor in hf])
    whole = _interleave_qkv(*hf, arch) if entry.kind == "qkv" else hf[0]
    return whole if entry.tensor_dim is None else whole.chunk(size, entry.tensor_dim)[rank]


def unshard(entry: ParameterMap, slices: list[Tensor], arch: Architecture) -> list[Tensor]:
    """Inverse of :func:`shard`: the whole HF tensors from every rank's slice, in rank order."""
    if entry.kind == "glu":
        gates, ups = zip(*(part.chunk(2, 0) for part in slices), strict=True)
        return [torch.cat(gates), torch.cat(ups)]
    whole = slices[0] if entry.tensor_dim is None else torch.cat(slices, entry.tensor_dim)
    return _split_qkv(whole, arch) if entry.kind == "qkv" else [whole]


def _interleave_qkv(q: Tensor, k: Tensor, v: Tensor, arch: Architecture) -> Tensor:
    """Megatron's order: for each key-value head, its query heads, its key, its value."""
    heads, width = arch.num_key_value_heads, q.shape[-1]
    parts = [x.reshape(heads, -1, width) for x in (q, k, v)]
    return torch.cat(parts, 1).reshape(-1, width)


def _split_qkv(whole: Tensor, arch: Architecture) -> list[Tensor]:
    heads, dim, width = arch.num_key_value_heads, arch.head_dim, whole.shape[-1]
    queries = arch.num_attention_heads // heads * dim
    parts = whole.reshape(heads, -1, width).split([queries, dim, dim], 1)
    return [part.reshape(-1, width) for part in parts]
