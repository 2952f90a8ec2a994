"""Micro-batches through Megatron's own forward-backward schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_tim.megatron.packing import MicroBatch

# Receives a micro-batch and its logits [tokens, vocab / tp] on the last stage; returns the scalar to
# differentiate (ignored when forward only) and anything to hand back.
OnLogits = Callable[[MicroBatch, Tensor], tuple[Tensor, Any]]


def run_schedule(
    chunks: list[torch.nn.Module],
    micro_batches: list[MicroBatch],
    on_logits: OnLogits,
    *,
    forward_only: bool,
    after_forward: Callable[[MicroBatch], None] | None = None,
) -> list[Any]:
    """Runs every micro-batch and returns what ``on_logits`` handed back, in order (empty before the last stage).

    The gradient is that of the plain sum of the scalars over the micro-batches of all data-parallel
    ranks: the schedule divides each by the number of micro-batches and DDP averages over ranks, and
    both factors are undone here.

    Args:
        after_forward: called on every stage when a micro-batch has gone through this rank's layers.
    """
    scale = len(micro_batches) * parallel_state.get_data_parallel_world_size(with_context_parallel=True)

    def forward_step(batches, model):
        batch = next(batches)
        output = model(
            batch.input_ids,
            batch.position_ids,
            None,
            packed_seq_params=batch.packed_seq_params,
            **_model_precision_output(model),
        )
        if after_forward is not None:
            after_forward(batch)

        def loss(logits: Tensor) -> tuple[Tensor, Any]:
            scalar, result = on_logits(batch, logits[0])
            return scalar * scale, result

        return output, loss

    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(micro_batches),
        model=chunks,
        num_microbatches=len(micro_batches),
        # Sizes of unpacked batches; stages exchange the shapes of packed ones (variable_seq_lengths).
        seq_length=micro_batches[0].input_ids.shape[1],
        micro_batch_size=1,
        forward_only=forward_only,
    )


def _model_precision_output(model: torch.nn.Module) -> dict[str, bool]:
    """Asks the bf16 wrapper not to copy all logits to float32: they are widened a chunk at a time."""
    return {"fp32_output": False} if get_model_config(model).bf16 else {}
