"""The processes of a job on one machine: how they are started, and how they fail with one sentence."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_tim.config import ParallelConfig

USER_ERROR_STATUS = 2
_PR_SET_PDEATHSIG = 1


def default_processes(parallel: ParallelConfig) -> int:
    """One process a GPU; without GPUs the fewest that the layout runs on."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else parallel.min_world_size


def run_workers(processes: int, command: list[str]) -> int:
    """Runs ``python -m megatron_tim COMMAND`` as one torchrun world and returns the exit status.

    The workers print their own errors; torchrun's account of them (a traceback of its own) is left out.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for part in ("agent.server.api", "multiprocessing.api"):  # each has a level of its own
        logging.getLogger(f"torch.distributed.elastic.{part}").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.2,
        start_method="spawn",
    )
    try:
        elastic_launch(config, entrypoint=sys.executable)("-m", "megatron_tim", *command)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:
        return 128 + error.sigval
    return 0


def quiet_libraries() -> None:
    """Keeps Megatron's remarks on what is not installed, and torch's on what Megatron calls, from the terminal."""
    warnings.filterwarnings("ignore", module=r"megatron\.core")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")


def stop_on_sigterm() -> None:
    """SIGTERM, which torchrun sends to the survivors, ends a worker like an exit: files and servers are closed.

    Should the launcher itself be killed, the kernel kills the worker, and its server goes with it.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:  # a process that a user started alone may outlive the shell
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    def stop(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the first one is being obeyed
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, stop)


@contextmanager
def exit_as_one() -> Iterator[None]:
    """Lets the first failure of a world reach the terminal, and only that one.

    Several ranks may raise the same UserError; and when one rank goes, the others fail in whatever
    collective they wait in, which is no news.
    """
    try:
        yield
    except (SystemExit, KeyboardInterrupt):
        _is_first_to_fail()  # whoever loses this rank need not tell
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        if _is_first_to_fail():
            raise
        raise SystemExit(USER_ERROR_STATUS) from error


def _is_first_to_fail() -> bool:
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return True
    try:
        return dist.distributed_c10d._get_default_store().add("megatron_tim/failures", 1) == 1
    except RuntimeError:  # the store went with the rank that failed first
        return False
