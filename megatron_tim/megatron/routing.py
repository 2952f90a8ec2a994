"""Which experts each token was sent to in a forward pass, read from Megatron's routers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor

from megatron_tim.megatron.collective import gather_tensors
from megatron_tim.megatron.model import unwrap
from megatron_tim.megatron.packing import MicroBatch, Sample


class RoutingRecorder:
    """Collects the experts of every sample, layer by layer, while its context is open.

    Layers are keyed by absolute number, so pipeline stages can be put together afterwards.
    """

    def __init__(self) -> None:
        self._latest: dict[int, Tensor] = {}
        self._experts: dict[str, Tensor] = {}

    @contextmanager
    def attached(self, chunks: list[torch.nn.Module]) -> Iterator[RoutingRecorder]:
        """Listens to the routers of ``chunks``."""
        layers = [layer for chunk in chunks for layer in unwrap(chunk).decoder.layers if hasattr(layer.mlp, "router")]
        hooks = [layer.mlp.router.register_forward_hook(self._listener(layer.layer_number - 1)) for layer in layers]
        try:
            yield self
        finally:
            for hook in hooks:
                hook.remove()

    def after_forward(self, batch: MicroBatch, samples: list[Sample]) -> None:
        """Files the micro-batch that just went through this rank's layers under its samples."""
        for layer, routing_map in self._latest.items():
            experts = _experts_of(routing_map)
            for index, start in zip(batch.indices, batch.row_starts, strict=True):
                self._experts[_key(index, layer)] = experts[start : start + len(samples[index].tokens) - 1]
        self._latest.clear()

    def gathered(self, samples: list[Sample], moe_layers: tuple[int, ...]) -> list[np.ndarray]:
        """For each sample the experts ``[P + R - 1, moe_layers, topk]`` in ascending order; collective."""
        mine = self._experts if parallel_state.get_tensor_model_parallel_rank() == 0 else {}
        experts = {key: value for part in gather_tensors(mine) for key, value in part.items()}
        return [torch.stack([experts[_key(i, layer)] for layer in moe_layers], dim=1).numpy() for i in range(len(samples))]

    def _listener(self, layer: int):
        def listen(router: torch.nn.Module, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
            routing_map = output[1]
            if router.config.sequence_parallel:
                routing_map = tensor_parallel.gather_from_sequence_parallel_region(routing_map.to(torch.uint8)).bool()
            self._latest[layer] = routing_map

        return listen


def _key(index: int, layer: int) -> str:
    return f"{index}.{layer}"


def _experts_of(routing_map: Tensor) -> Tensor:
    """``[tokens, experts]`` bool to ``[tokens, topk]`` expert numbers, ascending."""
    tokens = routing_map.shape[0]
    return routing_map.nonzero()[:, 1].view(tokens, -1).to(torch.int16).cpu()
