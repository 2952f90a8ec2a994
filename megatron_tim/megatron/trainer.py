"""The training engine: a Megatron model with its optimizer, scoring samples and stepping on them.

It knows layouts, packing and the schedule. It does not know rewards or corrections: the objective
comes in as a function of a micro-batch's log-probs, and hands back sums of metrics.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from torch import Tensor

from megatron_tim.config import OptimizerConfig, ParallelConfig, TrainConfig
from megatron_tim.correction.sums import MetricSums
from megatron_tim.megatron import platform
from megatron_tim.megatron.architecture import read_architecture, transformer_config
from megatron_tim.megatron.collective import gather_tensors
from megatron_tim.megatron.hf_weights import load_hf_weights, save_hf
from megatron_tim.megatron.logprobs import TokenScores, token_logprobs
from megatron_tim.megatron.model import build_model, initialize_parallel
from megatron_tim.megatron.packing import MicroBatch, Sample, pack, plan_micro_batches
from megatron_tim.megatron.routing import RoutingRecorder
from megatron_tim.megatron.schedule import run_schedule

# (micro-batch, scores of its tokens) -> (sum to minimise, sums of its metrics).
Objective = Callable[[MicroBatch, TokenScores], tuple[Tensor, MetricSums]]


@dataclasses.dataclass(frozen=True)
class Scores:
    """Of all scored tokens, samples end to end: log-prob and entropy (float32, nats), whether it is the most likely token.

    ``routes`` are the experts of each sample, ``[P + R - 1, moe_layers, topk]`` ascending, if asked for.
    """

    logprobs: Tensor
    entropy: Tensor
    is_top: Tensor
    routes: list[np.ndarray] | None


@dataclasses.dataclass(frozen=True)
class StepResult:
    """One optimizer step: the gradient norm before clipping, whether it was applied, the sums of all micro-batches and ranks."""

    grad_norm: float
    applied: bool
    sums: MetricSums


class MegatronTrainer:
    """A model at a layout on this rank's share of the machine. Every method is collective."""

    def __init__(self, hf_path: Path, parallel: ParallelConfig, train: TrainConfig, seed: int) -> None:
        """Builds the model and reads its weights.

        Raises:
            UserError: the model or the layout is unsuitable (see ``architecture`` and ``hf_weights``).
        """
        self.arch = read_architecture(hf_path)
        self.train_config, self.hf_path, self.parallel = train, Path(hf_path), parallel
        config = transformer_config(self.arch, parallel, train)
        initialize_parallel(parallel, seed)
        self.chunks = build_model(self.arch, config)
        config.finalize_model_grads_func = finalize_model_grads
        self._config = config
        self.optimizer = None
        load_hf_weights(self.chunks, self.arch, self.hf_path)

    def load_hf(self, hf_path: Path) -> None:
        """Replaces the weights by those of a folder of the same architecture; the optimizer starts afresh."""
        load_hf_weights(self.chunks, self.arch, hf_path)
        self.optimizer = None

    def new_optimizer(self, config: OptimizerConfig, lr: float | None = None) -> None:
        """Starts a fresh Adam with a constant learning rate (``config.lr`` unless given)."""
        bf16 = self._config.bf16
        settings = MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr if lr is None else lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.eps,
            clip_grad=config.clip_grad,
            bf16=bf16,
            params_dtype=self._config.params_dtype,
            use_distributed_optimizer=False,
        )
        self.optimizer = get_megatron_optimizer(settings, self.chunks)
        self._config.grad_scale_func = self.optimizer.scale_loss

    @torch.no_grad()
    def score(self, samples: list[Sample], temperature: float = 1.0, record_routes: bool = False) -> Scores:
        """Forward pass only: the log-prob of every scored token of every sample, on every rank."""
        recorder = RoutingRecorder() if record_routes else None
        self._set_training(False)

        def on_logits(batch: MicroBatch, logits: Tensor) -> tuple[Tensor, Any]:
            return logits.new_zeros(()), (batch, self._token_logprobs(batch, logits, temperature))

        with recorder.attached(self.chunks) if recorder else nullcontext():
            results = run_schedule(
                self.chunks,
                self.micro_batches(samples),
                on_logits,
                forward_only=True,
                after_forward=(lambda batch: recorder.after_forward(batch, samples)) if recorder else None,
            )
        logprobs, entropy, is_top = self._assemble(samples, results)
        routes = recorder.gathered(samples, self.arch.moe_layers) if recorder else None
        return Scores(logprobs, entropy, is_top > 0, routes)

    def gradients(self, samples: list[Sample], objective: Objective, denominator: float, temperature: float = 1.0) -> MetricSums:
        """Forward and backward: leaves the gradient of (sum of the objective over all ranks) / ``denominator``.

        Returns:
            The objective's sums over the micro-batches of all data-parallel ranks, the same on every rank.
        """
        self._set_training(True)
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        if self.optimizer is not None:
            self.optimizer.zero_grad()

        def on_logits(batch: MicroBatch, logits: Tensor) -> tuple[Tensor, Any]:
            loss_sum, result = objective(batch, self._token_logprobs(batch, logits, temperature))
            return loss_sum / denominator, result

        results = run_schedule(self.chunks, self.micro_batches(samples), on_logits, forward_only=False)
        return _combined(results)

    def step(self, samples: list[Sample], objective: Objective, denominator: float, temperature: float = 1.0) -> StepResult:
        """One optimizer step. A non-finite gradient leaves the weights alone and says so (``applied`` False)."""
        sums = self.gradients(samples, objective, denominator, temperature)
        finite = self._gradients_are_finite()
        if not finite:
            return StepResult(float("nan"), False, sums)
        applied, grad_norm, _ = self.optimizer.step()
        return StepResult(float(grad_norm or 0.0), bool(applied), sums)

    def save_hf(self, target: Path, dtype: torch.dtype | None = None) -> None:
        """Writes the model as a Hugging Face folder (see ``hf_weights.save_hf``)."""
        save_hf(self.chunks, self.arch, self.hf_path, target, dtype)

    def micro_batches(self, samples: list[Sample]) -> list[MicroBatch]:
        """This data-parallel rank's share of the samples, packed; as many micro-batches as every other rank has."""
        plan = plan_micro_batches(
            [len(s.tokens) for s in samples],
            self.train_config.tokens_per_micro_batch,
            parallel_state.get_data_parallel_world_size(),
        )
        shards = self._config.tensor_model_parallel_size if self._config.sequence_parallel else 1
        mine = plan[parallel_state.get_data_parallel_rank()]
        return [pack(samples, indices, platform.device(), shards) for indices in mine]

    def _token_logprobs(self, batch: MicroBatch, logits: Tensor, temperature: float) -> TokenScores:
        return token_logprobs(
            logits,
            batch.rows,
            batch.targets,
            temperature=temperature,
            chunk_tokens=self.train_config.logprob_chunk_tokens,
            group=parallel_state.get_tensor_model_parallel_group(),
        )

    def _assemble(self, samples: list[Sample], results: list[tuple[MicroBatch, TokenScores]]) -> Tensor:
        """``[3, tokens]``: every rank's scores in the samples' order. Each is nonzero on one rank, so the sum is exact."""
        ends = np.cumsum([s.response_length for s in samples])
        flat = torch.zeros(3, int(ends[-1]) if len(ends) else 0, dtype=torch.float32, device=platform.device())
        if parallel_state.get_tensor_model_parallel_rank() == 0:
            for batch, scores in results:
                packed, bounds = torch.stack([x.float() for x in scores]), batch.cu_seqlens.tolist()
                for index, start, stop in zip(batch.indices, bounds[:-1], bounds[1:], strict=True):
                    flat[:, ends[index] - samples[index].response_length : ends[index]] = packed[:, start:stop]
        dist.all_reduce(flat)
        return flat.cpu()

    def _set_training(self, training: bool) -> None:
        for chunk in self.chunks:
            chunk.train(training)

    def _gradients_are_finite(self) -> bool:
        finite = torch.ones((), device=platform.device())
        for chunk in self.chunks:
            for parameter in chunk.parameters():
                if not torch.isfinite(parameter.main_grad).all():
                    finite.zero_()
        dist.all_reduce(finite, op=dist.ReduceOp.MIN)
        return bool(finite.item())


def _combined(sums: list[MetricSums]) -> MetricSums:
    """The sums of the last stage's first tensor rank of every data-parallel rank, added in rank order: the same on every rank."""
    speaks = parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0
    mine = reduce(add, sums, MetricSums()) if speaks else MetricSums()
    return reduce(add, map(MetricSums.from_tensors, gather_tensors(mine.to_tensors())))
