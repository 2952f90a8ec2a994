"""The server's command line and environment."""

from __future__ import annotations

import importlib.metadata
import socket
from pathlib import Path

import pytest

from megatron_tim.config import RolloutConfig
from megatron_tim.errors import UserError
from megatron_tim.rollout import launch

PARENT = {
    "PATH": "/bin",
    "HOME": "/home/someone",
    "HF_HUB_OFFLINE": "1",
    "NCCL_SOCKET_IFNAME": "eth0",
    "RANK": "3",
    "LOCAL_RANK": "3",
    "GROUP_RANK": "0",
    "ROLE_RANK": "3",
    "ROLE_NAME": "default",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "8",
    "GROUP_WORLD_SIZE": "1",
    "ROLE_WORLD_SIZE": "8",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "OMP_NUM_THREADS": "16",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "NCCL_ALGO": "Ring",
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",
    "MEGATRON_TIM_API_KEY": "secret",
}


@pytest.mark.parametrize("cuda", [False, True])
def test_nothing_of_the_trainer_reaches_the_server(cuda: bool) -> None:
    env = launch.server_environment(RolloutConfig(), PARENT, cuda)
    cpu_only = set() if cuda else {"SGLANG_USE_CPU_ENGINE", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"}
    assert set(env) - cpu_only - {"TORCHINDUCTOR_CACHE_DIR"} == {"PATH", "HOME", "HF_HUB_OFFLINE", "NCCL_SOCKET_IFNAME"}
    assert env.get("OMP_NUM_THREADS") == (None if cuda else "1")


def test_the_config_has_the_last_word_on_the_environment() -> None:
    config = RolloutConfig(env={"SGLANG_RETURN_ORIGINAL_LOGPROB": "1", "OMP_NUM_THREADS": "4"}, tensor_parallel_size=2)
    env = launch.server_environment(config, PARENT, cuda=False)
    assert env["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "1" and env["OMP_NUM_THREADS"] == "4"
    assert env["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1"


def test_the_cuda_launch_is_the_cpu_launch_without_the_cpu_words(tmp_path: Path) -> None:
    config = RolloutConfig(dtype="bfloat16", concurrency=48, extra_args=["--mem-fraction-static", "0.7"])
    cpu = launch.server_command(config, tmp_path, 30000, seed=5, cuda=False)
    cuda = launch.server_command(config, tmp_path, 30000, seed=5, cuda=True)
    assert [word for word in cpu if word in cuda] == cuda
    assert "--attention-backend" not in cuda and cuda[-2:] == ["--mem-fraction-static", "0.7"]
    for name, value in {"--dtype": "bfloat16", "--host": "127.0.0.1", "--max-running-requests": "48", "--random-seed": "5"}.items():
        assert cuda[cuda.index(name) + 1] == value


def test_a_port_in_use_is_refused_and_a_free_one_found() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"rollout.port {port} cannot be used on rollout.host 127.0.0.1: Address already in use"):
            launch.choose_port("127.0.0.1", port)
    assert launch.choose_port("127.0.0.1", port) == port
    assert 20000 <= launch.choose_port("127.0.0.1", None) < 32000
    with pytest.raises(UserError, match="rollout.host 192.0.2.1"):
        launch.choose_port("192.0.2.1", 30000)


@pytest.mark.parametrize("version", ["0.5.17", "0.6.0", "0.4.9.post1"])
def test_a_version_that_cannot_work_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    with pytest.raises(UserError, match=f"SGLang {version} is not supported"):
        launch.check_version()


def test_another_version_warns_and_a_missing_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch.check_version() == launch.TESTED_VERSION
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.5.20")
    with pytest.warns(UserWarning, match="SGLang 0.5.20 is not the tested version"):
        assert launch.check_version() == "0.5.20"

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(UserError, match="SGLang is not installed .* launch/setup.sh"):
        launch.check_version()
