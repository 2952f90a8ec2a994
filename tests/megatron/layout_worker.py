"""Run under torchrun: for each layout of this world size, the facts that tests/megatron/test_layouts.py checks.

usage: layout_worker.py HF_PATH REFERENCE OUT LAYOUT [LAYOUT ...]   (LAYOUT: tp1-pp1-ep2-etp1-budget64-none-float32)
"""

import re
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_tim.config import OptimizerConfig, ParallelConfig, TrainConfig
from megatron_tim.correction import MetricSums
from megatron_tim.megatron.collective import gather_tensors
from megatron_tim.megatron.hf_weights import hf_tensors
from megatron_tim.megatron.packing import Sample
from megatron_tim.megatron.trainer import MegatronTrainer

TEMPERATURE = 0.8


def parse(layout: str) -> tuple[ParallelConfig, TrainConfig]:
    pattern = r"tp(\d)-pp(\d)-ep(\d)-etp(\d)-budget(\d+)-(\w+)-(\w+)"
    tp, pp, ep, etp, budget, recompute, dtype = re.fullmatch(pattern, layout).groups()
    parallel = ParallelConfig(
        tensor_parallel_size=int(tp), pipeline_parallel_size=int(pp), expert_parallel_size=int(ep), expert_tensor_parallel_size=int(etp)
    )
    return parallel, TrainConfig(dtype=dtype, tokens_per_micro_batch=int(budget), recompute=recompute, logprob_chunk_tokens=7)


def objective(batch, scores):
    """A sum over tokens in which every sequence and token counts differently."""
    loss = -(batch.fields["advantages"] * scores.logprobs).sum() - 0.1 * scores.entropy.sum()
    return loss, MetricSums({"loss": loss.detach().double()})


def facts(trainer: MegatronTrainer, samples: list[Sample], out: Path) -> dict:
    scores = trainer.score(samples, TEMPERATURE, record_routes=True)
    tokens = sum(s.response_length for s in samples)
    loss = trainer.gradients(samples, objective, tokens, TEMPERATURE).to_floats()["loss"]
    mine = {name: grad.clone() for name, grad in hf_tensors(trainer.chunks, trainer.arch, of=lambda p: p.main_grad)}
    parts = gather_tensors(mine)
    trainer.save_hf(out)
    trainer.new_optimizer(OptimizerConfig(lr=1e-3, clip_grad=0.5))
    step = trainer.step(samples, objective, tokens, TEMPERATURE)
    return {
        "grad_norm": step.grad_norm,
        "logprobs_after_a_step": trainer.score(samples, TEMPERATURE).logprobs,
        "logprobs": scores.logprobs,
        "entropy": scores.entropy,
        "is_top": scores.is_top,
        "routes": scores.routes,
        "loss": loss / tokens,
        "gradients": {name: grad for part in parts for name, grad in part.items()},
    }


def main() -> None:
    hf_path, reference, out, *layouts = sys.argv[1:]
    samples = [Sample(**s) for s in torch.load(reference, weights_only=True)["samples"]]
    for layout in layouts:
        parallel, train = parse(layout)
        trainer = MegatronTrainer(Path(hf_path), parallel, train, seed=1)
        result = facts(trainer, samples, Path(out) / layout)
        if dist.get_rank() == 0:
            torch.save(result, Path(out) / f"{layout}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
