"""Keeps one server alive no longer than the process that asked for it.

Run as ``python -m megatron_tim.rollout.supervisor`` with stdin a pipe held by the parent. The first
line is a JSON :class:`Launch`; the line ``ready`` says that the server has read its configuration;
the end of the pipe, which the kernel closes when the parent dies of whatever cause, means stop. This
process imports no more than it needs, for it lives as long as the server.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import BinaryIO

import psutil

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PARENT_POLL_S = 0.5
_CONFIG = "server.yaml"
_REDACTED = b"<api key>"
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Launch:
    """What to run: ``argv`` with ``env``, its output copied to ``log_path`` without ``api_key``.

    ``{config}`` in ``argv`` becomes the path of a YAML file, readable by this user alone, that holds
    the key: a command line would show it to every user of the machine.
    """

    argv: list[str]
    env: dict[str, str]
    log_path: str
    api_key: str
    parent_pid: int


def main() -> None:
    """Runs the server until it ends, the parent ends, or a signal asks for the end."""
    # Unbuffered: a thread that waits in a buffered read would hold its lock when the interpreter ends.
    requests = FileIO(sys.stdin.fileno(), closefd=False)
    line = requests.readline()
    if not line.strip():
        return
    launch = Launch(**json.loads(line))
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: over.set())
    private = Path(tempfile.mkdtemp(prefix="megatron-tim-"))
    try:
        server = _start(launch, private)
        threading.Thread(target=_watch_stdin, args=(requests, over, private / _CONFIG), daemon=True).start()
        threading.Thread(target=_copy_output, args=(server.stdout, launch)).start()
        # The parent is looked at too, as a process that it forked may keep the pipe open after its death.
        while server.poll() is None and os.getppid() == launch.parent_pid and not over.wait(_PARENT_POLL_S):
            pass
    finally:
        kill_descendants()
        shutil.rmtree(private, ignore_errors=True)


def kill_descendants() -> None:
    """Kills every descendant of this process, also those that changed session or lost their parent.

    As this process is a subreaper, an orphan becomes its child and stays in sight. SIGKILL at once:
    SGLang's own shutdown takes up to 20 s and saves nothing that is needed, except for its names in
    shared memory, which are removed here.
    """
    shared: set[int] = set()
    while children := psutil.Process().children(recursive=True):
        # All are looked at before the first is killed: SGLang's processes die with their parent.
        shared |= set().union(*(_shared_memory_inodes(child.pid) for child in children))
        for child in children:
            _kill(child)
        psutil.wait_procs(children, timeout=1.0)
    with os.scandir(_SHARED_MEMORY) as entries:
        for entry in entries:
            if entry.inode() in shared and entry.name.startswith(("sem.mp-", "sglang_")):
                Path(entry.path).unlink(missing_ok=True)


def _shared_memory_inodes(pid: int) -> set[int]:
    """Inodes, as the C library maps a semaphore under a temporary name and then renames it."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:  # the process is gone
        return set()
    return {int(line.split()[4]) for line in lines if f" {_SHARED_MEMORY}/" in line}


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


def _start(launch: Launch, private: Path) -> subprocess.Popen[bytes]:
    config = private / _CONFIG
    with open(os.open(config, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        json.dump({"api-key": launch.api_key}, file)
    return subprocess.Popen(
        [str(config) if word == "{config}" else word for word in launch.argv],
        env={**launch.env, "TMPDIR": str(private)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        # Should this process itself be killed with SIGKILL, the kernel still ends the server.
        preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
    )


def _watch_stdin(requests: FileIO, over: threading.Event, config: Path) -> None:
    for line in requests:
        if line.strip() == b"ready":
            config.unlink(missing_ok=True)
    over.set()


def _copy_output(output: BinaryIO, launch: Launch) -> None:
    """Copies lines to the log; a full disk loses log lines, but the server must not block on its pipe."""
    key = launch.api_key.encode()
    with open(launch.log_path, "ab", buffering=0) as log:
        for line in output:
            try:
                log.write(line.replace(key, _REDACTED))
            except OSError:
                continue


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


if __name__ == "__main__":
    main()
