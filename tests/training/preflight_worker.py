"""Run under torchrun: preflights of a healthy server and of planted faults, for tests/training/test_preflight.py.

usage: preflight_worker.py BASE_URL MODEL OTHER_MODEL OUT; the API key is in MEGATRON_TIM_API_KEY
"""

import dataclasses
import json
import os
import sys
from pathlib import Path

import numpy as np
import torch.distributed as dist

from megatron_tim.config import ParallelConfig, PreflightConfig, RolloutConfig, TrainConfig
from megatron_tim.megatron.collective import on_main
from megatron_tim.megatron.trainer import MegatronTrainer
from megatron_tim.rollout.client import SGLangClient
from megatron_tim.rollout.records import from_bytes, to_bytes
from megatron_tim.training.preflight import run_preflight

PROMPTS = [[5 + i, 100 + 3 * i, 40, 7 * i + 9, *range(200, 200 + i)] for i in range(24)]


def shifted(trajectory, by):
    return dataclasses.replace(trajectory, rollout_logprobs=np.roll(trajectory.rollout_logprobs, by))


def main() -> None:
    base_url, model, other_model, out = sys.argv[1:]
    trainer = MegatronTrainer(Path(model), ParallelConfig(expert_parallel_size=2), TrainConfig(dtype="float32"), seed=1)
    client = SGLangClient(base_url, os.environ["MEGATRON_TIM_API_KEY"], timeout_s=120)

    def sample(temperature):
        def work():
            return to_bytes(
                client.sample(
                    PROMPTS, 1, temperature=temperature, max_new_tokens=12, concurrency=32, return_routed_experts=True, stop_token_ids=[2]
                )
            )

        return from_bytes(on_main(work))

    def preflight(trajectories, temperature=1.0, **rollout):
        config = RolloutConfig(dtype="float32", temperature=temperature, **rollout)
        return dataclasses.asdict(run_preflight(trainer, trajectories, config, PreflightConfig()))

    healthy = sample(1.0)
    results = {
        "healthy": preflight(healthy),
        "healthy at 0.7": preflight(sample(0.7), 0.7),
        "recorded before temperature": preflight(healthy, 0.7),
        "one token late": preflight([shifted(t, 1) for t in healthy]),
        "one token early": preflight([shifted(t, -1) for t in healthy]),
    }
    on_main(lambda: client.update_weights_from_disk(other_model, "other"))
    try:
        results["other weights"] = preflight(sample(1.0))
    finally:
        on_main(lambda: client.update_weights_from_disk(model, "0"))
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
