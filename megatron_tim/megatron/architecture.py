"""A Hugging Face ``config.json`` read into the shape of a model, and turned into Megatron's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from megatron_tim.config import ParallelConfig, TrainConfig, describe_problem
from megatron_tim.errors import UserError
from megatron_tim.hf_config import read_hf_config
from megatron_tim.replay.layout import MoELayout

TORCH_DTYPE = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Architecture:
    """What the trainer needs to know of a Qwen3-MoE model; names follow its ``config.json``."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    intermediate_size: int
    norm_topk_prob: bool
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    moe_layers: tuple[int, ...]
    """0-based numbers of the layers that route tokens to experts."""


def read_architecture(hf_path: Path) -> Architecture:
    """Reads ``hf_path/config.json``.

    Raises:
        UserError: the folder or file is missing, or the model is not one that is supported.
    """
    path, raw = read_hf_config(hf_path)
    if raw.get("model_type") != "qwen3_moe":
        raise UserError(f"{path}: model_type is {raw.get('model_type')!r}; supported: 'qwen3_moe'.")
    _refuse_unsupported(path, raw)
    values = _typed(path, raw)
    return Architecture(
        **values.model_dump(exclude={"head_dim"}),
        head_dim=values.head_dim or values.hidden_size // values.num_attention_heads,
        rope_theta=_rope_theta(path, raw),
        moe_layers=MoELayout.from_hf(hf_path).moe_layers,
    )


_Count = Annotated[int, Field(ge=1)]


class _Qwen3MoeKeys(BaseModel):
    """The keys of ``config.json`` that :class:`Architecture` takes over, with what they may hold."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    vocab_size: _Count
    hidden_size: _Count
    num_hidden_layers: _Count
    num_attention_heads: _Count
    num_key_value_heads: _Count
    head_dim: _Count | None = None
    num_experts: _Count = Field(validation_alias=AliasChoices("num_experts", "num_local_experts"))  # transformers 5 writes the second
    num_experts_per_tok: _Count
    moe_intermediate_size: _Count
    intermediate_size: _Count
    norm_topk_prob: bool
    rms_norm_eps: float = Field(gt=0)
    max_position_embeddings: _Count
    tie_word_embeddings: bool = False


def _typed(path: Path, raw: dict[str, Any]) -> _Qwen3MoeKeys:
    try:
        values = _Qwen3MoeKeys.model_validate(raw)
    except ValidationError as error:
        problem = error.errors()[0]
        if problem["type"] == "missing":
            raise UserError(f"{path}: key '{problem['loc'][0]}' is missing; a Qwen3-MoE config.json has it.") from None
        raise UserError(f"{path}: {describe_problem(problem)}.") from None
    if values.num_attention_heads % values.num_key_value_heads:
        raise UserError(
            f"{path}: num_key_value_heads = {values.num_key_value_heads} must divide num_attention_heads = {values.num_attention_heads}."
        )
    if values.num_experts_per_tok > values.num_experts:
        raise UserError(f"{path}: num_experts_per_tok = {values.num_experts_per_tok} exceeds num_experts = {values.num_experts}.")
    return values


def transformer_config(arch: Architecture, parallel: ParallelConfig, train: TrainConfig) -> TransformerConfig:
    """Megatron's configuration of ``arch`` at a layout, with every fusion that changes bits or needs a GPU off."""
    check_layout(arch, parallel)
    dtype = TORCH_DTYPE[train.dtype]
    return TransformerConfig(
        num_layers=arch.num_hidden_layers,
        hidden_size=arch.hidden_size,
        num_attention_heads=arch.num_attention_heads,
        num_query_groups=arch.num_key_value_heads,
        kv_channels=arch.head_dim,
        ffn_hidden_size=arch.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=arch.rms_norm_eps,
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        **_moe_settings(arch),
        **_parallel_settings(parallel, dtype),
        **_recompute_settings(train),
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_cpu_initialization=True,
        perform_initialization=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
    )


def check_layout(arch: Architecture, parallel: ParallelConfig) -> None:
    """Refuses a layout that does not divide the model, naming the key and the numbers.

    Raises:
        UserError: what does not divide what.
    """
    tensor, pipeline, expert = parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.expert_parallel_size
    for key, size, what, number in (
        ("expert_parallel_size", expert, "experts", arch.num_experts),
        ("pipeline_parallel_size", pipeline, "layers", arch.num_hidden_layers),
        ("tensor_parallel_size", tensor, "attention heads", arch.num_attention_heads),
        ("tensor_parallel_size", tensor, "key-value heads", arch.num_key_value_heads),
        ("tensor_parallel_size", tensor, "vocabulary entries", arch.vocab_size),
        ("expert_tensor_parallel_size", parallel.expert_tensor_parallel_size, "expert hidden units", arch.moe_intermediate_size),
    ):
        if number % size:
            divisors = [d for d in range(1, number + 1) if number % d == 0][:8]
            raise UserError(
                f"parallel.{key} = {size} does not divide the model's {number} {what}; choose one of {', '.join(map(str, divisors))}."
            )
    if arch.tie_word_embeddings and pipeline > 1:
        raise UserError(f"parallel.pipeline_parallel_size = {pipeline} is not supported for a model that ties its embeddings; set it to 1.")
    expert_tensor = parallel.expert_tensor_parallel_size
    if expert_tensor not in (1, tensor) or (expert == 1 and expert_tensor != tensor):
        raise UserError(
            f"parallel.expert_tensor_parallel_size = {expert_tensor} with tensor_parallel_size = {tensor} and expert_parallel_size ="
            f" {expert} gives wrong expert gradients in megatron-core 0.16; set expert_tensor_parallel_size to {tensor}"
            + (", or to 1 with expert_parallel_size > 1." if tensor > 1 else ".")
        )


def _moe_settings(arch: Architecture) -> dict[str, Any]:
    return {
        "num_moe_experts": arch.num_experts,
        "moe_layer_freq": [int(i in arch.moe_layers) for i in range(arch.num_hidden_layers)],
        "moe_router_topk": arch.num_experts_per_tok,
        "moe_ffn_hidden_size": arch.moe_intermediate_size,
        # Top-k before softmax equals renormalising the k probabilities (norm_topk_prob).
        "moe_router_pre_softmax": not arch.norm_topk_prob,
        "moe_router_dtype": "fp32",
        # RL keeps the router's gradient free of balancing terms.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": False,
    }


def _parallel_settings(parallel: ParallelConfig, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": parallel.tensor_parallel_size,
        "pipeline_model_parallel_size": parallel.pipeline_parallel_size,
        "expert_model_parallel_size": parallel.expert_parallel_size,
        "expert_tensor_parallel_size": parallel.expert_tensor_parallel_size,
        # Megatron requires sequence parallelism for MoE layers under tensor parallelism.
        "sequence_parallel": parallel.tensor_parallel_size > 1,
        "pipeline_dtype": dtype,
        "autocast_dtype": dtype,
        # Packed micro-batches differ in length; stages exchange the shape first.
        "variable_seq_lengths": parallel.pipeline_parallel_size > 1,
    }


def _recompute_settings(train: TrainConfig) -> dict[str, Any]:
    if train.recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if train.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    return {}


def _refuse_unsupported(path: Path, raw: dict[str, Any]) -> None:
    for key, allowed in {"hidden_act": ("silu",), "attention_bias": (False,), "use_sliding_window": (False, None)}.items():
        value = raw.get(key, allowed[0])
        if value not in allowed:
            raise UserError(f"{path}: {key} = {value!r} is not supported; allowed: {allowed[0]!r}.")


def _rope_theta(path: Path, raw: dict[str, Any]) -> float:
    """The RoPE base, from ``rope_parameters`` (transformers 5) or ``rope_theta``; scaled RoPE is refused."""
    key = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    rope = raw.get(key) or {}
    if not isinstance(rope, dict):
        raise UserError(f'{path}: {key} = {rope!r} is refused: it must be an object, such as {{"rope_type": "default"}}.')
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise UserError(f"{path}: RoPE of type {kind!r} is not supported; allowed: 'default'.")
    theta = rope.get("rope_theta", raw.get("rope_theta", 10000.0))
    if type(theta) not in (int, float) or not 0 < theta < float("inf"):
        raise UserError(f"{path}: rope_theta = {theta!r} is refused: it must be a number above 0.")
    return float(theta)
