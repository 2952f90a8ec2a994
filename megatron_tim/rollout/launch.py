"""The command line and the environment of an SGLang server, as pure functions of the configuration."""

from __future__ import annotations

import importlib.metadata
import os
import re
import socket
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path

from megatron_tim.config import RolloutConfig
from megatron_tim.errors import UserError

TESTED_VERSION = "0.5.23"
_OLDEST_PATCH = 18

# Ports below the range from which the kernel takes the ports of outgoing connections, so that none
# of those takes the server's while it starts.
_FREE_PORTS = range(20000, 32000)

# Set by torchrun, by Megatron's launch scripts or by thread tuning for the trainer; each changes what SGLang does.
_TRAINER_VARIABLES = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE|NAME)|GROUP_RANK|MASTER_(ADDR|PORT)|TORCHELASTIC_.*|TORCH_NCCL_ASYNC_ERROR_HANDLING"
    r"|OMP_.*|MKL_.*|KMP_.*|CUDA_DEVICE_MAX_CONNECTIONS|NCCL_ALGO|SGLANG_.*|SGL_.*|MEGATRON_TIM_API_KEY"
)


def check_version() -> str:
    """Returns the installed SGLang's version.

    Raises:
        UserError: SGLang is missing or is not 0.5.18 or later of 0.5. Another 0.5.x than the tested one warns.
    """
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise UserError(f"SGLang is not installed in {sys.prefix}; run launch/setup.sh, which installs sglang {TESTED_VERSION}.") from None
    check_tested(version)
    return version


def check_tested(version: str) -> None:
    """Refuses a version that is known not to work and warns of one that is not tested."""
    match = re.match(r"0\.5\.(\d+)", version)
    if match is None or int(match[1]) < _OLDEST_PATCH:
        raise UserError(f"SGLang {version} is not supported; install {TESTED_VERSION} (0.5.{_OLDEST_PATCH} or later of 0.5 may work).")
    if version != TESTED_VERSION:
        warnings.warn(f"SGLang {version} is not the tested version {TESTED_VERSION}; check the preflight's numbers.", stacklevel=3)


def choose_port(host: str, port: int | None) -> int:
    """Returns ``port`` if nothing listens there, or a free one when it is None.

    Raises:
        UserError: the port is in use, or ``host`` is not an address of this machine.
    """
    candidates = _FREE_PORTS if port is None else [port]
    start = os.getpid() % len(candidates)
    for candidate in [*candidates[start:], *candidates[:start]]:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, candidate))
                return candidate
            except OSError as error:
                problem = error.strerror
    what = f"rollout.port {port}" if port is not None else "every port from 20000 to 31999"
    raise UserError(f"{what} cannot be used on rollout.host {host}: {problem}; stop what listens there or choose another.")


def server_command(config: RolloutConfig, model_path: Path, port: int, seed: int, cuda: bool) -> list[str]:
    """Returns the words that start the server; ``{config}`` stands for the file with the API key."""
    words = [sys.executable, "-m", "sglang.launch_server", "--config", "{config}", "--model-path", str(model_path.resolve())]
    words += ["--host", config.host, "--port", str(port), "--dtype", config.dtype, "--tp-size", str(config.tensor_parallel_size)]
    words += ["--max-running-requests", str(config.concurrency), "--weight-version", "0", "--random-seed", str(seed)]
    # Token ids go in and come out: no tokenizer, so no text to compute.
    words += ["--skip-tokenizer-init", "--enable-return-routed-experts", "--sleep-on-idle", "--log-level-http", "warning"]
    if not cuda:
        words += ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
        words += ["--max-total-tokens", str(config.max_total_tokens), "--skip-server-warmup"]
    return words + config.extra_args


def server_environment(config: RolloutConfig, parent: Mapping[str, str], cuda: bool) -> dict[str, str]:
    """Returns the parent's environment without what was meant for the trainer, with ``config.env`` on top.

    ``SGLANG_*`` variables come from ``config.env`` alone: they change the log-probs that are recorded
    (SGLANG_RETURN_ORIGINAL_LOGPROB), and the run's configuration must show it.
    """
    env = {name: value for name, value in parent.items() if not _TRAINER_VARIABLES.fullmatch(name)}
    # The server's TMPDIR is private and removed with it; compiled kernels are worth keeping.
    env.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}"))
    if not cuda:
        env |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        if config.tensor_parallel_size > 1:
            env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(rank) for rank in range(config.tensor_parallel_size))
    return env | config.env
