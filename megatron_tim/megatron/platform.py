"""Which device Megatron-Core runs on, and which versions of it are known to work.

Megatron-Core is written for CUDA. On a machine without a GPU the patches of ``cpu_patches`` make
the same code run on the CPU with gloo; with a GPU nothing is patched.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os

import torch
import torch.distributed as dist

from megatron_tim.errors import UserError

TESTED_MEGATRON = ("0.16.1",)
SUPPORTED_MEGATRON = ("0.16", "0.17", "0.18", "0.19")

_prepared = False
_prepared_cuda = False


def is_cuda() -> bool:
    """Whether the trainer runs on a GPU."""
    return _prepared_cuda if _prepared else torch.cuda.is_available()


def device() -> torch.device:
    """The device of this rank's parameters."""
    return torch.device("cuda", torch.cuda.current_device()) if is_cuda() else torch.device("cpu")


def prepare() -> None:
    """Checks the Megatron-Core version and, without a GPU, installs the CPU patches. Idempotent.

    Raises:
        UserError: Megatron-Core is missing or of a version that was never tried.
    """
    global _prepared, _prepared_cuda
    if _prepared:
        return
    _check_version()
    _prepared_cuda = torch.cuda.is_available()
    _prepared = True
    if not _prepared_cuda:
        from megatron_tim.megatron import cpu_patches

        cpu_patches.install()


def init_process_group(timeout_s: float = 24 * 3600) -> None:
    """Joins the torchrun world (or a world of one) with NCCL on GPUs and gloo on CPUs.

    The other ranks wait in a collective while rank 0 starts a server or samples, so the time-out is
    long; a rank that dies is noticed at once by torchrun.
    """
    if dist.is_initialized():
        return
    if is_cuda():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    timeout = datetime.timedelta(seconds=timeout_s)
    backend = "nccl" if is_cuda() else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)


def _check_version() -> None:
    try:
        version = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        raise UserError("megatron-core is not installed; run launch/setup.sh.") from None
    if ".".join(version.split(".")[:2]) not in SUPPORTED_MEGATRON:
        raise UserError(
            f"megatron-core {version} is not supported: {SUPPORTED_MEGATRON[0]} to {SUPPORTED_MEGATRON[-1]} are"
            f" (tested: {', '.join(TESTED_MEGATRON)}); run launch/setup.sh."
        )
