"""Run under torchrun: loss, gradients and metrics of the policy objective, for tests/training/test_policy.py.

usage: policy_worker.py HF_PATH BATCH OUT CASE [CASE ...]   (CASE: ep2-budget40-ppo-recompute)
"""

import re
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_tim.config import Config
from megatron_tim.correction import denominator_parts, summarise, token_coefficients
from megatron_tim.megatron.collective import gather_tensors
from megatron_tim.megatron.hf_weights import hf_tensors
from megatron_tim.megatron.packing import Sample
from megatron_tim.megatron.trainer import MegatronTrainer
from megatron_tim.training.policy import policy_objective


def make_config(hf_path: str, case: str) -> Config:
    ep, budget, loss, mode = re.fullmatch(r"ep(\d)-budget(\d+)-(\w+)-(\w+)", case).groups()
    return Config.model_validate(
        {
            "run": {"name": "test", "steps": 1},
            "model": {"hf_path": hf_path},
            "data": {"train": "unused", "eval": "unused"},
            "parallel": {"expert_parallel_size": int(ep)},
            "train": {"dtype": "float32", "tokens_per_micro_batch": int(budget)},
            "loss": {"name": loss, "entropy_coeff": 0.02},
            "correction": {"method": "none" if (loss, mode) == ("ppo", "bypass") else "cis", "mode": mode},
        }
    )


def fields(sample: dict, config: Config, drop: set[str]) -> dict[str, torch.Tensor]:
    found = {name: values for name, values in sample["fields"].items() if name not in drop}
    mask = found["mask"]
    return found | {"coefficients": token_coefficients(mask, config.loss, torch.tensor([0, mask.numel()]))}


def main() -> None:
    hf_path, batch, out, *cases = sys.argv[1:]
    saved = torch.load(batch, weights_only=True)
    for case in cases:
        config = make_config(hf_path, case)
        drop = {"old_logprobs", "weights"} if config.correction.mode == "bypass" else set()
        samples = [Sample(s["tokens"], s["prompt_length"], fields(s, config, drop)) for s in saved["samples"]]
        trainer = MegatronTrainer(Path(hf_path), config.parallel, config.train, seed=1)
        denominator = sum(
            denominator_parts(s.fields["mask"], config.loss, torch.tensor([0, len(s.fields["mask"])])).sum().item() for s in samples
        )
        sums = trainer.gradients(samples, policy_objective(config), denominator)
        parts = gather_tensors({n: g.clone() for n, g in hf_tensors(trainer.chunks, trainer.arch, of=lambda p: p.main_grad)})
        facts = {
            "micro_batches": len(trainer.micro_batches(samples)),
            "metrics": summarise(sums),
            "gradients": {name: grad for part in parts for name, grad in part.items()},
        }
        if dist.get_rank() == 0:
            torch.save(facts, Path(out) / f"{case}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
