"""``megatron-tim doctor``: what it finds in good and bad installations, and its exit status."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import pytest

from megatron_tim import environment
from megatron_tim.cli.main import main

INSTALLED = {
    "torch": "2.13.0+cpu",
    "megatron-core": "0.16.1",
    "sglang": "0.5.23",
    "sglang-cpu-shim": "0.3",
    "transformers": "5.19.0",
}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Sets what is installed and which GPUs there are, for the checks that look at nothing else."""

    def pretend(gpus: int = 0, cuda: str | None = None, **installed: str | None) -> None:
        versions = INSTALLED | {name.replace("_", "-"): version for name, version in installed.items()}
        monkeypatch.setattr(environment, "installed_version", versions.get)
        monkeypatch.setattr(environment, "gpu_count", lambda: gpus)
        monkeypatch.setattr(environment, "torch_cuda_version", lambda: cuda)

    return pretend


def disk_with(monkeypatch: pytest.MonkeyPatch, free_gb: float) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(environment.shutil, "disk_usage", lambda path: usage(0, 0, int(free_gb * environment.GB)))


def test_this_environment_is_ready_and_says_so_quickly() -> None:
    code = (
        "import sys; from megatron_tim.cli.main import main; status = main(['doctor', '--json']);"
        "sys.exit('torch was imported' if 'torch' in sys.modules else status)"
    )
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - started < 3
    answer = json.loads(done.stdout)
    assert answer["ready"] is True
    assert {"name", "status", "detail", "advice"} == set(answer["checks"][0])
    assert {"torch", "megatron-core", "sglang", "transformers"} <= {package["name"] for package in answer["packages"]}


def test_tables_show_every_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert all(check.name in shown for check in environment.checks())
    assert "ready to run" in shown


def test_a_problem_gives_status_1_and_advice(machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine(sglang=None)
    assert main(["doctor", "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["ready"] is False
    problems = {check["name"]: check for check in answer["checks"] if check["status"] == "problem"}
    assert "launch/setup.sh" in problems["rollout engine"]["advice"]
    assert "sglang" in problems["packages"]["detail"]
    assert main(["doctor"]) == 1
    assert "not ready to run" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("installation", "status", "words"),
    [
        ({}, "ok", "CPU through sglang-cpu-shim"),
        ({"sglang_cpu_shim": None}, "problem", "cannot start on a CPU"),
        ({"gpus": 8, "cuda": "13.0", "sglang_cpu_shim": None, "sglang_kernel": "0.4.10"}, "ok", "CUDA"),
        ({"gpus": 8, "cuda": "13.0", "sglang_kernel": "0.4.10"}, "problem", "hides SGLang's GPU kernels"),
        ({"gpus": 8, "cuda": "13.0", "sglang_cpu_shim": None}, "problem", "without sglang-kernel"),
        ({"gpus": 8, "cuda": None}, "ok", "CPU through sglang-cpu-shim"),
        ({"cuda": "13.0"}, "ok", "CPU through sglang-cpu-shim"),
    ],
)
def test_rollout_engine(machine, installation: dict, status: str, words: str) -> None:
    machine(**installation)
    check = environment.check_rollout_engine()
    assert check.status == status
    assert words in check.detail
    assert bool(check.advice) == (status != "ok")


@pytest.mark.parametrize(
    ("installation", "status", "words"),
    [
        ({}, "ok", "local layers on the CPU"),
        ({"megatron_core": None}, "problem", "not installed"),
        ({"transformer_engine": "2.11.0"}, "problem", "makes the import of Megatron-Core fail"),
        ({"gpus": 8, "cuda": "13.0", "transformer_engine": "2.11.0"}, "ok", "Transformer Engine 2.11.0"),
        ({"gpus": 8, "cuda": "13.0"}, "warning", "transformer-engine is not installed"),
    ],
)
def test_trainer(machine, installation: dict, status: str, words: str) -> None:
    machine(**installation)
    check = environment.check_trainer()
    assert check.status == status
    assert words in check.detail


@pytest.mark.parametrize(
    ("gpus", "cuda", "status", "words"),
    [
        (0, None, "ok", "torch built for CPU"),
        (0, "13.0", "ok", "torch built for CUDA 13.0"),
        (8, "13.0", "ok", "8 NVIDIA GPUs"),
        (8, None, "warning", "8 NVIDIA GPUs are not used"),
    ],
)
def test_device(machine, gpus: int, cuda: str | None, status: str, words: str) -> None:
    machine(gpus=gpus, cuda=cuda)
    check = environment.check_device()
    assert (check.status, words in check.detail) == (status, True)


def test_another_version_than_the_tested_one_is_a_warning() -> None:
    found = [environment.Package("sglang", "0.5.24", "0.5.23"), environment.Package("torch", "2.13.0+cpu", "2.13.0")]
    check = environment.check_packages(found)
    assert check.status == "warning"
    assert check.detail == "not the tested versions: sglang 0.5.24 (tested: 0.5.23)"


def test_tested_versions_are_those_of_the_requirement_files() -> None:
    assert environment.tested_versions(gpu=False)["torch"] == "2.13.0"
    gpu = environment.tested_versions(gpu=True)
    assert "torch" not in gpu  # SGLang chooses it there
    assert gpu["transformer-engine"] == "2.11.0"


def test_without_the_repository_nothing_is_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environment, "REQUIREMENTS", tmp_path)
    assert environment.tested_versions(gpu=False) == {}
    assert all(package.is_tested for package in environment.packages())


def test_an_unsupported_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 13, 0))
    check = environment.check_python()
    assert check.status == "problem"
    assert "PYTHON=" in check.advice


@pytest.mark.parametrize(("free", "status"), [(0.1, "problem"), (2, "warning"), (50, "ok")])
def test_disk(monkeypatch: pytest.MonkeyPatch, free: float, status: str) -> None:
    disk_with(monkeypatch, free)
    assert environment.check_disk(Path(".")).status == status


@pytest.mark.parametrize(("free", "status"), [(0.01, "problem"), (0.0625, "warning"), (8, "ok")])
def test_shared_memory(monkeypatch: pytest.MonkeyPatch, free: float, status: str) -> None:
    disk_with(monkeypatch, free)
    assert environment.check_shared_memory().status == status


def test_variables_that_change_results_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in environment.NUMERIC_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert environment.check_numerics().status == "ok"
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    check = environment.check_numerics()
    assert (check.status, check.detail) == ("warning", "set here: NCCL_ALGO=Tree")


def test_hidden_gpus_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.Path, "glob", lambda self, pattern: map(Path, ["/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl"]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert environment.gpu_count() == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert environment.gpu_count() == 0


def test_the_build_of_torch_is_read_from_its_files() -> None:
    import torch

    assert environment.torch_cuda_version() == torch.version.cuda
