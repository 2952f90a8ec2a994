"""What launch/setup.sh would install, and which Python and device it chooses."""

from __future__ import annotations

import pytest

from tests.launch.scripts import FAKE_PYTHON, Scripts

NVIDIA_SMI = "#!/bin/bash\necho 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0)'\n"
BROKEN_SHIM = "#!/bin/bash\necho 'pyenv: python3.12: command not found' >&2\nexit 127\n"
TOO_NEW = "#!/bin/bash\necho 3.13\nexit 3\n"
NO_VENV = "#!/bin/bash\necho 3.12\nexit 1\n"


def plan(scripts: Scripts, **environment: str) -> dict[str, str]:
    done = scripts.run("setup.sh", "--plan", **environment)
    assert done.returncode == 0, done.stderr
    return dict(line.split(": ", 1) for line in done.stdout.splitlines())


def test_cpu_set_has_the_shim(scripts: Scripts) -> None:
    planned = plan(scripts)
    assert planned["device"] == "cpu"
    assert planned["python"] == f"3.11 ({scripts.bin}/python3.11)"
    assert [word.split("/")[-1] for word in planned["requirements"].split()] == ["bootstrap.txt", "torch.txt", "cpu.txt", "dev.txt"]
    assert planned["sglang cpu shim"] == "yes"


def test_a_gpu_is_detected_and_never_gets_the_shim(scripts: Scripts) -> None:
    scripts.add("nvidia-smi", NVIDIA_SMI)
    planned = plan(scripts, MEGATRON_TIM_DEVICE="")
    assert planned["device"] == "cuda"
    assert [word.split("/")[-1] for word in planned["requirements"].split()] == ["bootstrap.txt", "gpu.txt", "gpu-build.txt", "dev.txt"]
    assert planned["sglang cpu shim"] == "no"


def test_the_variable_overrides_the_detection(scripts: Scripts) -> None:
    scripts.add("nvidia-smi", NVIDIA_SMI)
    assert plan(scripts, MEGATRON_TIM_DEVICE="cpu")["device"] == "cpu"


def test_a_broken_driver_is_no_gpu(scripts: Scripts) -> None:
    scripts.add("nvidia-smi", "#!/bin/bash\necho 'NVIDIA-SMI has failed' >&2\nexit 9\n")
    assert plan(scripts, MEGATRON_TIM_DEVICE="")["device"] == "cpu"


def test_an_unknown_device_is_refused(scripts: Scripts) -> None:
    done = scripts.run("setup.sh", "--plan", MEGATRON_TIM_DEVICE="tpu")
    assert done.returncode == 1
    assert done.stderr == "setup.sh: error: MEGATRON_TIM_DEVICE=tpu is not a device; it must be cpu or cuda, or unset to detect.\n"


def test_the_first_python_that_works_is_taken(scripts: Scripts) -> None:
    scripts.add("python3.11", BROKEN_SHIM)
    scripts.add("python3.12", NO_VENV)
    scripts.add("python3", FAKE_PYTHON)
    assert plan(scripts, FAKE_VERSION="3.12")["python"] == f"3.12 ({scripts.bin}/python3)"


def test_no_python_says_which_were_found(scripts: Scripts) -> None:
    scripts.add("python3.11", BROKEN_SHIM)
    scripts.add("python3.12", NO_VENV)
    scripts.add("python3", TOO_NEW)
    done = scripts.run("setup.sh")
    assert done.returncode == 1
    assert "no Python 3.11 or 3.12 with the venv module" in done.stderr
    for finding in ("python3.11 does not run", "python3.12 is 3.12 without the venv module", "python3 is 3.13"):
        assert finding in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_named_python_is_taken_or_refused_by_name(scripts: Scripts) -> None:
    scripts.add("mine", FAKE_PYTHON)
    assert plan(scripts, PYTHON=str(scripts.bin / "mine"))["python"].endswith("/mine)")
    done = scripts.run("setup.sh", PYTHON="/nowhere/python")
    assert done.returncode == 1
    assert "PYTHON=/nowhere/python does not fit (not found)" in done.stderr


@pytest.mark.parametrize("argument", ["--paln", "x"])
def test_an_unknown_argument_is_refused(scripts: Scripts, argument: str) -> None:
    done = scripts.run("setup.sh", argument)
    assert (done.returncode, done.stdout) == (1, "")
    assert argument in done.stderr


def test_help(scripts: Scripts) -> None:
    done = scripts.run("setup.sh", "--help")
    assert done.returncode == 0
    assert "--plan" in done.stdout
