"""How launch/setup.sh installs: once, again when something changed, after an interruption, and in parallel."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.launch.scripts import Scripts


def installed(scripts: Scripts, **environment: str) -> list[str]:
    done = scripts.run("setup.sh", **environment)
    assert done.returncode == 0, done.stderr
    return scripts.calls()


def refused(scripts: Scripts, **environment: str) -> str:
    done = scripts.run("setup.sh", **environment)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    return done.stderr


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)


def test_a_second_call_does_nothing_and_is_quick(scripts: Scripts) -> None:
    assert len(installed(scripts)) == 6
    started = time.monotonic()
    assert installed(scripts) == []
    assert time.monotonic() - started < 1


def test_the_cpu_set_is_pinned_and_unresolved_but_for_torch(scripts: Scripts) -> None:
    calls = installed(scripts)
    with_requirements = [call for call in calls if " -r " in call and "bootstrap" not in call and "--dry-run" not in call]
    torch, rest = with_requirements
    assert "torch.txt" in torch and "-c " in torch and "--no-deps" not in torch
    assert "cpu.txt" in rest and "--no-deps" in rest
    assert "shim-source" in calls[-2]
    assert calls[-1].endswith(f"-e {scripts.root}")


def test_the_gpu_set_never_has_the_shim(scripts: Scripts) -> None:
    scripts.add("nvcc", "#!/bin/bash\n")
    calls = installed(scripts, MEGATRON_TIM_DEVICE="cuda")
    assert not any("shim" in call or "cpu.txt" in call for call in calls)
    assert any("gpu.txt" in call for call in calls)


def test_the_gpu_set_needs_the_compiler(scripts: Scripts) -> None:
    assert "nvcc is not found" in refused(scripts, MEGATRON_TIM_DEVICE="cuda", CUDA_HOME="/nowhere")
    assert not (scripts.root / ".venv").exists()


def test_changed_requirements_make_it_anew(scripts: Scripts) -> None:
    installed(scripts)
    (scripts.root / ".venv" / "left-over").touch()
    append(scripts.root / "launch" / "requirements" / "cpu.txt", "six==1.17.0\n")
    assert len(installed(scripts)) == 6
    assert not (scripts.root / ".venv" / "left-over").exists()


def test_a_changed_device_makes_it_anew(scripts: Scripts) -> None:
    scripts.add("nvcc", "#!/bin/bash\n")
    installed(scripts)
    assert any("gpu.txt" in call for call in installed(scripts, MEGATRON_TIM_DEVICE="cuda"))


@pytest.mark.parametrize("source", ["setup.py", "tools/sglang_cpu_shim/sgl_kernel/__init__.py"])
def test_a_change_of_our_own_packages_reinstalls_only_them(scripts: Scripts, source: str) -> None:
    installed(scripts)
    append(scripts.root / source, "# changed\n")
    assert len(installed(scripts)) == 2
    assert installed(scripts) == []


def test_a_moved_repository_is_made_anew(scripts: Scripts) -> None:
    installed(scripts)
    scripts.root = scripts.root.rename(scripts.root.with_name("moved"))
    assert len(installed(scripts)) == 6


def test_a_failed_one_is_done_again(scripts: Scripts) -> None:
    refused(scripts, FAKE_PIP_ERROR="whatever")
    scripts.calls()
    assert len(installed(scripts)) == 6


def test_a_killed_one_is_done_again(scripts: Scripts) -> None:
    process = scripts.start("setup.sh", FAKE_PIP_SECONDS="1")
    while not scripts.log.exists():
        time.sleep(0.05)
    process.kill()
    process.communicate()
    scripts.calls()
    assert len(installed(scripts)) == 6


def test_ctrl_c_says_so(scripts: Scripts) -> None:
    process = scripts.start("setup.sh", FAKE_PIP_SECONDS="30")
    while not scripts.log.exists():
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=10)
    assert process.returncode == 130
    assert "interrupted; run this again to finish" in out
    assert err == ""


def test_two_at_once_install_once(scripts: Scripts) -> None:
    both = [scripts.start("setup.sh", FAKE_PIP_SECONDS="0.2") for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum("waiting for it" in output for output in outputs) == 1
    assert len(scripts.calls()) == 6


def test_an_environment_of_someone_else_is_left_alone(scripts: Scripts) -> None:
    (scripts.root / ".venv").mkdir()
    (scripts.root / ".venv" / "precious").touch()
    assert "was not made by this script" in refused(scripts)
    assert (scripts.root / ".venv" / "precious").exists()


def test_too_little_disk(scripts: Scripts) -> None:
    assert "needs 4 GB of free disk" in refused(scripts, FAKE_FREE_GB="3")
    assert not (scripts.root / ".venv").exists()


def test_a_cuda_build_of_torch_needs_more_disk(scripts: Scripts) -> None:
    message = refused(scripts, FAKE_FREE_GB="6", FAKE_TORCH_BUILD="")
    assert "the CUDA build of torch" in message and "needs 9 GB" in message and "6 GB are free" in message
    scripts.calls()
    assert len(installed(scripts, FAKE_TORCH_BUILD="")) == 6


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        ("Failed to establish a new connection: NewConnectionError", "the package index cannot be reached"),
        ("[Errno 28] No space left on device", "the disk is full"),
        ("No matching distribution found for torch==2.13.0", "does not offer torch==2.13.0 for Python 3.11"),
        ("something else", "pip: failed"),
    ],
)
def test_pip_failures_are_one_sentence_and_name_the_log(scripts: Scripts, error: str, sentence: str) -> None:
    message = refused(scripts, FAKE_PIP_ERROR=error)
    assert sentence in message
    assert message.endswith(f"the output is in {scripts.root}/.venv/setup.log\n")
