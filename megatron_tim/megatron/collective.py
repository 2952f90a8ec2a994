"""Work that one rank does for all, without leaving the others waiting when it fails."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from megatron_tim.errors import UserError, writing
from megatron_tim.megatron import platform

_OK, _USER_ERROR, _ERROR = range(3)


def is_main() -> bool:
    """Whether this is the rank that talks to the engine and writes the run directory."""
    return dist.get_rank() == 0


def on_main(work: Callable[[], bytes | None]) -> bytes:
    """Runs ``work`` on rank 0 and returns its bytes on every rank.

    Raises:
        UserError: on every rank when ``work`` raised one on rank 0.
        RuntimeError: on the other ranks when ``work`` raised anything else (rank 0 raises that).
    """
    status, payload, failure = _OK, b"", None
    if is_main():
        try:
            payload = work() or b""
        except UserError as error:
            status, payload, failure = _USER_ERROR, str(error).encode(), error
        except (KeyboardInterrupt, SystemExit):
            raise  # the others are being stopped too
        except BaseException as error:
            status, payload, failure = _ERROR, repr(error).encode(), error
    status, payload = _broadcast(status, payload)
    if failure is not None:
        raise failure
    if status == _USER_ERROR:
        raise UserError(payload.decode())
    if status == _ERROR:
        raise RuntimeError(f"rank 0 failed: {payload.decode()}")
    return payload


def gather_bytes(payload: bytes) -> list[bytes]:
    """``payload`` of every rank, in rank order, on every rank. Collective."""
    if dist.get_world_size() == 1:
        return [payload]
    size = torch.tensor([len(payload)], dtype=torch.int64, device=platform.device())
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    lengths = [int(length) for length in sizes]
    mine = torch.zeros(max(*lengths, 1), dtype=torch.uint8, device=platform.device())
    if payload:
        mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    parts = [torch.empty_like(mine) for _ in lengths]
    dist.all_gather(parts, mine)
    return [part[:length].cpu().numpy().tobytes() for part, length in zip(parts, lengths, strict=True)]


def gather_tensors(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """The named tensors of every rank, in rank order, in host memory of every rank; nothing is pickled. Collective."""
    packed = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    return [load(part) for part in gather_bytes(packed)]


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder that all ranks fill and that gets its name ``target`` when complete, or vanishes when one of them fails. Collective.

    A folder of that name is replaced, after the new one is complete.

    Raises:
        UserError: it cannot be written.
    """
    partial = target.with_name(target.name + ".partial")
    try:
        with writing(target):
            if is_main():
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
            dist.barrier()
            yield partial
            dist.barrier()
            if is_main():
                shutil.rmtree(target, ignore_errors=True)
                partial.rename(target)
            dist.barrier()
    finally:
        if is_main():
            shutil.rmtree(partial, ignore_errors=True)


def _broadcast(status: int, payload: bytes) -> tuple[int, bytes]:
    """What rank 0 got from an engine goes to all ranks as plain bytes."""
    if dist.get_world_size() == 1:
        return status, payload
    header = torch.tensor([status, len(payload)], dtype=torch.int64, device=platform.device())
    dist.broadcast(header, src=0)
    status, size = header.tolist()
    body = torch.frombuffer(bytearray(payload or b"\0"), dtype=torch.uint8).to(platform.device())
    if not is_main():
        body = torch.empty(max(size, 1), dtype=torch.uint8, device=platform.device())
    dist.broadcast(body, src=0)
    return status, body.cpu().numpy().tobytes()[:size]
