"""Builds a Megatron GPTModel from an architecture and a layout."""

from __future__ import annotations

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_tim.config import ParallelConfig
from megatron_tim.megatron import platform
from megatron_tim.megatron.architecture import Architecture
from megatron_tim.megatron.modules import PackedAttention, RMSNorm
from megatron_tim.megatron.weight_map import parameter_maps


def initialize_parallel(parallel: ParallelConfig, seed: int) -> None:
    """Joins the process group and forms Megatron's groups for ``parallel``; safe to call again for the same layout.

    Raises:
        UserError: the number of processes does not fit the layout.
    """
    platform.init_process_group()
    parallel.check_world_size(torch.distributed.get_world_size())
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_parallel_size,
        expert_model_parallel_size=parallel.expert_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
    )
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def build_model(arch: Architecture, config: TransformerConfig) -> list[torch.nn.Module]:
    """This rank's model chunks, wrapped for gradient reduction, on the rank's device, weights unset."""
    model = GPTModel(
        config=config,
        transformer_layer_spec=_block_spec(config),
        vocab_size=arch.vocab_size,
        max_sequence_length=arch.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=arch.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=arch.rope_theta,
    )
    model = model.to(platform.device())
    # Megatron marks sharded weights when it initialises them, which loading replaces; without the mark
    # the gradient norm takes the shards of ranks > 0 for duplicates and leaves them out.
    for entry in parameter_maps(model, arch):
        entry.parameter.tensor_model_parallel = entry.tensor_dim is not None
    if config.bf16:
        model = Float16Module(config, model)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=False)
    return [DistributedDataParallel(config=config, ddp_config=ddp, module=model)]


def unwrap(chunk: torch.nn.Module) -> GPTModel:
    """The GPTModel inside DDP and precision wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Megatron's local layers of this stage with our norm and packed attention."""
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    for layer in block.layer_specs:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = PackedAttention
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    block.layer_norm = RMSNorm
    return block
