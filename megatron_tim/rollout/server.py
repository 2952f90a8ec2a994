"""Starts, attaches to and stops an SGLang server."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import requests

import megatron_tim
from megatron_tim.config import RolloutConfig
from megatron_tim.errors import UserError, writing
from megatron_tim.rollout import launch
from megatron_tim.rollout.supervisor import Launch

Progress = Callable[[float, str], None]

_POLL_S = 0.2
_STOP_TIMEOUT_S = 30.0
_STAGES = {
    b"fired up": "ready",
    b"Uvicorn running": "warming up",
    b"KV Cache is allocated": "allocating the cache",
    b"Load weight end": "allocating the cache",
    b"Load weight begin": "loading the weights",
    b"Init parallel begin": "starting the model's processes",
    b"server_args=": "starting the model's processes",
}
_FIRST_STAGE = "importing SGLang"
_ERROR_LINE = re.compile(r"^(?:\[[^\]]*\]\s*)?((?:[\w.]*(?:Error|Exception|Interrupt)\b|[\w. -]*: error:).*)$")


class SGLangServer:
    """A running server: ``base_url`` and ``api_key`` are what a client needs.

    Used as a context manager, it stops a server that it started; one that it attached to keeps running.
    """

    def __init__(
        self, base_url: str, api_key: str, log_path: Path | None = None, supervisor: subprocess.Popen[bytes] | None = None
    ) -> None:
        self.base_url = base_url
        self.api_key = api_key
        self.log_path = log_path
        self._supervisor = supervisor

    @classmethod
    def start(
        cls,
        config: RolloutConfig,
        model_path: Path | str,
        log_path: Path | str,
        on_progress: Progress | None = None,
        seed: int = 1,
    ) -> Self:
        """Starts a server for the model and waits until it answers.

        Args:
            config: host, port, arithmetic, sizes and time limits.
            model_path: folder in Hugging Face format.
            log_path: the server's output, without its API key; an existing file is replaced.
            on_progress: called about five times a second with the seconds since the start and the stage.
            seed: of the sampler; a resumed run passes another one, lest it draw the same numbers again.

        Raises:
            UserError: no SGLang, no such model, the port is in use, the server died or was not ready in
                ``config.start_timeout_s``; the sentence gives the likely reason and the log's path.
        """
        launch.check_version()
        model_path, log_path = Path(model_path), Path(log_path)
        if not (model_path / "config.json").is_file():
            raise UserError(f"model folder {model_path} has no config.json; give a folder in Hugging Face format.")
        port = launch.choose_port(config.host, config.port)
        with writing(log_path):
            log_path.parent.mkdir(parents=True, exist_ok=True)
            log_path.write_bytes(b"")
        api_key = secrets.token_hex(32)  # a URL-safe one can start with "-", which SGLang reads as the next option
        cuda = _has_cuda()
        spec = Launch(
            argv=launch.server_command(config, model_path, port, seed, cuda),
            env=launch.server_environment(config, os.environ, cuda),
            log_path=str(log_path.resolve()),
            api_key=api_key,
            parent_pid=os.getpid(),
        )
        server = cls(_url(config.host, port), api_key, log_path, _start_supervisor(spec))
        try:
            server._wait_until_ready(config.start_timeout_s, on_progress)
        except BaseException:
            server.stop()
            raise
        return server

    @classmethod
    def attach(cls, base_url: str, api_key: str) -> Self:
        """Uses a server that runs already, after checking that it answers, takes the key and has a known version.

        Raises:
            UserError: one of these does not hold.
        """
        from megatron_tim.rollout.client import SGLangClient

        server = cls(base_url.rstrip("/"), api_key)
        launch.check_tested(SGLangClient(server.base_url, api_key, timeout_s=30).server_info()["version"])
        return server

    def stop(self) -> None:
        """Stops a server that was started here, with all its processes; does nothing the second time."""
        if self._supervisor is None:
            return
        self._supervisor.stdin.close()
        try:
            self._supervisor.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            self._supervisor.wait()
        self._supervisor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _wait_until_ready(self, timeout_s: float, on_progress: Progress | None) -> None:
        started = time.monotonic()
        while not self._is_ready():
            elapsed = time.monotonic() - started
            stage = _stage(self.log_path)
            if self._supervisor.poll() is not None:
                reason = _last_error(self.log_path)
                raise UserError(f"the SGLang server stopped while it was {stage}: {reason}; its log is {self.log_path}.")
            if elapsed > timeout_s:
                raise UserError(
                    f"the SGLang server was not ready after rollout.start_timeout_s = {timeout_s:g} s (it was {stage});"
                    f" allow more time or see its log {self.log_path}."
                )
            if on_progress is not None:
                on_progress(elapsed, stage)
            time.sleep(_POLL_S)
        self._supervisor.stdin.write(b"ready\n")

    def _is_ready(self) -> bool:
        try:
            with requests.Session() as session:
                session.trust_env = False
                return session.get(self.base_url + "/ready", timeout=5).status_code == 200
        except requests.RequestException:
            return False


def _has_cuda() -> bool:
    import torch  # here, as it takes seconds and attaching does not need it

    return torch.cuda.is_available()


def _start_supervisor(spec: Launch) -> subprocess.Popen[bytes]:
    package_root = str(Path(megatron_tim.__file__).parents[1])
    supervisor = subprocess.Popen(
        [sys.executable, "-m", "megatron_tim.rollout.supervisor"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))},
        stdin=subprocess.PIPE,
        bufsize=0,
        # A session of its own: Ctrl-C in the terminal reaches the trainer, which decides when the server ends.
        start_new_session=True,
    )
    supervisor.stdin.write(json.dumps(dataclasses.asdict(spec)).encode() + b"\n")
    return supervisor


def _url(host: str, port: int) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _stage(log_path: Path) -> str:
    log = log_path.read_bytes()
    return next((stage for mark, stage in _STAGES.items() if mark in log), _FIRST_STAGE)


def _last_error(log_path: Path) -> str:
    """Returns the last line of the log that names an error, else its last line."""
    lines = [line.strip() for line in log_path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [match[1] for match in map(_ERROR_LINE.match, lines) if match]
    return (errors or lines or ["it wrote nothing"])[-1][:500].rstrip(".")
