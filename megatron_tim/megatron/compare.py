"""The proof that a Megatron model is the Hugging Face model: their logits, side by side."""

from __future__ import annotations

import struct

import torch
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor

from megatron_tim.megatron.collective import gather_tensors, on_main
from megatron_tim.megatron.packing import MicroBatch, Sample
from megatron_tim.megatron.schedule import run_schedule
from megatron_tim.megatron.trainer import MegatronTrainer

_LENGTHS = (3, 17, 40, 64)


def max_logit_difference(trainer: MegatronTrainer) -> float:
    """Largest |difference| of float32 logits to transformers' on random sequences, on every rank. Collective.

    Rank 0 loads the whole model with transformers.
    """
    generator = torch.Generator().manual_seed(0)
    samples = [Sample(torch.randint(trainer.arch.vocab_size, (n,), generator=generator), 1) for n in _LENGTHS]
    logits = _megatron_logits(trainer, samples)
    return struct.unpack("d", on_main(lambda: struct.pack("d", _difference(trainer, samples, logits))))[0]


@torch.no_grad()
def _megatron_logits(trainer: MegatronTrainer, samples: list[Sample]) -> dict[int, Tensor]:
    """float32 logits ``[tokens, vocab]`` by sample number, on every rank."""

    def on_logits(batch: MicroBatch, logits: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
        whole = tensor_parallel.gather_from_tensor_model_parallel_region(logits).float().cpu()
        rows = zip(batch.indices, batch.row_starts, strict=True)
        return logits.new_zeros(()), {i: whole[start : start + len(samples[i].tokens)] for i, start in rows}

    results = run_schedule(trainer.chunks, trainer.micro_batches(samples), on_logits, forward_only=True)
    speaks = parallel_state.get_tensor_model_parallel_rank() == 0
    mine = {str(index): logits for result in results for index, logits in result.items()} if speaks else {}
    return {int(index): logits for part in gather_tensors(mine) for index, logits in part.items()}


@torch.no_grad()
def _difference(trainer: MegatronTrainer, samples: list[Sample], logits: dict[int, Tensor]) -> float:
    from transformers import Qwen3MoeForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()

    model = Qwen3MoeForCausalLM.from_pretrained(trainer.hf_path, dtype=torch.float32, attn_implementation="eager", local_files_only=True)
    differences = [(model(s.tokens[None]).logits[0] - logits[i]).abs().max() for i, s in enumerate(samples)]
    return torch.stack(differences).max().item()  # unlike Python's max, this keeps a NaN
