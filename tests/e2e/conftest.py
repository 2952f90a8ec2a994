"""A real finished run of the main job, shared by the tests of this folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import make_arithmetic
import make_tiny_model
import pytest

from tests.processes import ROOT

SMALL = [
    "run.save_every=2",
    "run.tensorboard=true",
    "rollout.prompts_per_step=8",
    "rollout.samples_per_prompt=4",
    "rollout.concurrency=32",
    "warm_start.target_reward=0.1",
    "warm_start.batch_size=64",
    "evaluation.problems=50",
]


class Jobs:
    """Runs ``megatron-tim`` on a small task; run directories are under ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.overrides = [
            f"run.dir={folder}",
            f"model.hf_path={folder / 'model'}",
            *(f"data.{split}={folder / 'data' / split}.jsonl" for split in ("train", "eval")),
            f"warm_start.data={folder / 'data' / 'warm_start.jsonl'}",
            *SMALL,
        ]

    def command(self, *overrides: str) -> list[str]:
        return [sys.executable, "-m", "megatron_tim", "train", "--config", "configs/tiny_cpu.yaml", *self.overrides, *overrides]

    def start(self, *overrides: str, **popen: object) -> subprocess.Popen[str]:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"} | popen.pop("env", {})
        return subprocess.Popen(
            self.command(*overrides), cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **popen
        )

    def run(self, *overrides: str, status: int = 0, timeout: float = 600, **popen: object) -> subprocess.CompletedProcess[str]:
        process = self.start(*overrides, **popen)
        out, error = process.communicate(timeout=timeout)
        assert process.returncode == status, f"status {process.returncode}\n{out[-3000:]}\n{error[-3000:]}"
        return subprocess.CompletedProcess(process.args, process.returncode, out, error)

    def rows(self, name: str) -> list[dict]:
        return [json.loads(line) for line in (self.folder / name / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    folder = tmp_path_factory.mktemp("jobs")
    make_arithmetic.main(["--out", str(folder / "data"), "--train", "600", "--eval", "60"])
    sizes = ["--hidden", "64", "--heads", "4", "--kv-heads", "2", "--head-dim", "32", "--moe-ffn", "64"]
    make_tiny_model.main(["--out", str(folder / "model"), "--data", str(folder / "data" / "train.jsonl"), *sizes])
    return Jobs(folder)


@pytest.fixture(scope="session")
def finished_run(jobs: Jobs) -> subprocess.CompletedProcess[str]:
    """The whole job: warm start, server in bfloat16, preflight, 4 steps of RL with EP 2, evaluation."""
    return jobs.run("run.name=whole", "run.steps=4")
