"""Life and death of a real server."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from megatron_tim.config import RolloutConfig
from megatron_tim.errors import UserError
from megatron_tim.rollout.server import SGLangServer
from tests.rollout.processes import is_alive, shared_memory_of, wait_for

TRAINER = """
import sys, time
from megatron_tim.config import RolloutConfig
from megatron_tim.rollout.server import SGLangServer
config = RolloutConfig(dtype="float32", concurrency=4, max_total_tokens=1024, start_timeout_s=600)
with SGLangServer.start(config, sys.argv[1], sys.argv[2], lambda seconds, stage: print(stage, flush=True)):
    print("up", flush=True)
    time.sleep(600)
"""


def descendants(process: psutil.Process) -> list[psutil.Process]:
    return process.children(recursive=True)


def supervisor_of(server: SGLangServer) -> psutil.Process:
    return psutil.Process(server._supervisor.pid)


@pytest.fixture
def trainer(tiny_model: Path, tmp_path: Path) -> Callable[[str], tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """Starts a process with a server of its own; returns it and all its descendants once it printed a word."""

    def start(word: str) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
        words = [sys.executable, "-c", TRAINER, str(tiny_model), str(tmp_path / "sglang.log")]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        for line in process.stdout:
            if line.startswith(word):
                break
        return process, descendants(psutil.Process(process.pid))

    return start


def test_kill_9_of_the_trainer_leaves_nothing(trainer: Callable[[str], tuple[subprocess.Popen[str], list[psutil.Process]]]) -> None:
    process, family = trainer("up")
    assert len(family) >= 4, "supervisor, server, scheduler, detokenizer"
    files = shared_memory_of(member.pid for member in family)
    assert any(file.name.startswith("sglang_") for file in files)
    process.kill()
    process.wait()
    assert wait_for(lambda: not any(is_alive(member.pid) for member in family), 10)
    assert not any(file.exists() for file in files)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_trainer_ends_while_the_server_starts(
    trainer: Callable[[str], tuple[subprocess.Popen[str], list[psutil.Process]]], number: int
) -> None:
    process, _ = trainer("importing")
    assert wait_for(lambda: len(descendants(psutil.Process(process.pid))) >= 2)
    family = descendants(psutil.Process(process.pid))
    process.send_signal(number)
    process.wait()
    assert wait_for(lambda: not any(is_alive(member.pid) for member in family), 10)


def test_the_key_is_a_word_that_no_command_line_takes_for_an_option(sglang_server: SGLangServer) -> None:
    assert re.fullmatch("[0-9a-f]{64}", sglang_server.api_key)


def test_the_log_has_no_key_and_no_process_shows_it(sglang_server: SGLangServer) -> None:
    log = sglang_server.log_path.read_text()
    assert "server_args=" in log and "<api key>" in log and sglang_server.api_key not in log
    for process in [supervisor_of(sglang_server), *descendants(supervisor_of(sglang_server))]:
        assert sglang_server.api_key not in " ".join(process.cmdline())


def test_the_file_with_the_key_is_gone_once_the_server_is_up(sglang_server: SGLangServer) -> None:
    words = [word for process in descendants(supervisor_of(sglang_server)) for word in process.cmdline() if word.endswith("server.yaml")]
    assert words and not Path(words[0]).exists() and Path(words[0]).parent.exists()


def test_an_idle_server_rests(sglang_server: SGLangServer) -> None:
    family = [supervisor_of(sglang_server), *descendants(supervisor_of(sglang_server))]

    def cpu_seconds() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in family)

    time.sleep(1.0)
    before, start = cpu_seconds(), time.monotonic()
    time.sleep(4.0)
    assert (cpu_seconds() - before) / (time.monotonic() - start) < 0.15


def test_the_environment_of_the_trainer_stays_out(sglang_server: SGLangServer) -> None:
    """Seen in the launcher, from which SGLang's other processes inherit; those overwrite theirs with a title."""
    (launcher,) = supervisor_of(sglang_server).children()
    environment = launcher.environ()
    assert "SGLANG_RETURN_ORIGINAL_LOGPROB" not in environment
    assert environment["OMP_NUM_THREADS"] == "1" and environment["SGLANG_USE_CPU_ENGINE"] == "1"


def test_a_server_that_dies_gives_its_reason_and_its_log(tiny_model: Path, tmp_path: Path) -> None:
    config = RolloutConfig(dtype="float32", extra_args=["--no-such-word"])
    with pytest.raises(UserError, match=f"stopped while .*unrecognized arguments: --no-such-word; its log is {tmp_path}/sglang.log"):
        SGLangServer.start(config, tiny_model, tmp_path / "sglang.log")


def test_a_server_that_is_too_slow_is_stopped(tiny_model: Path, tmp_path: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(UserError, match=r"not ready after rollout.start_timeout_s = 0.5 s \(it was importing SGLang\)"):
        SGLangServer.start(RolloutConfig(start_timeout_s=0.5), tiny_model, tmp_path / "sglang.log")
    assert set(psutil.Process().children(recursive=True)) == before


def test_mistakes_are_refused_before_anything_starts(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no config.json; give a folder in Hugging Face format"):
        SGLangServer.start(RolloutConfig(), tmp_path, tmp_path / "log")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UserError, match="cannot be used on rollout.host 127.0.0.1: Address already in use"):
            SGLangServer.start(RolloutConfig(port=taken.getsockname()[1]), tiny_model, tmp_path / "log")
    assert not (tmp_path / "log").exists()
