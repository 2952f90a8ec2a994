"""Looking at processes from tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> bool:
    """Returns whether the condition became true in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


def is_alive(pid: int) -> bool:
    """Returns whether the process exists and is no zombie."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def shared_memory_of(pids: Iterable[int]) -> list[Path]:
    """Returns the files in /dev/shm that any of the processes has mapped, under the names they have now."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    inodes = {int(line.split()[4]) for line in lines if " /dev/shm/" in line}
    return [path for path in Path("/dev/shm").iterdir() if path.stat().st_ino in inodes]
