"""SGLang on a machine without a GPU: the plugin that SGLang runs at start, and what the stubs share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import NoReturn

HOST_CACHE_PARAMETERS = ("self", "num_tokens", "num_layers", "topk_size", "name", "device")


class ShimError(RuntimeError):
    """The shim does not fit this machine or this SGLang; the message says what to do."""


def refuse_cuda() -> None:
    """Raises :class:`ShimError` where CUDA is available: the shim would stand in front of the real kernels."""
    import torch

    if torch.cuda.is_available():
        raise ShimError("sglang-cpu-shim is no use beside CUDA; run `pip uninstall sglang-cpu-shim` and reinstall sglang-kernel.")


def unavailable(name: str) -> Callable[..., NoReturn]:
    """A stand-in that can be imported, and raises NotImplementedError when called."""

    def call(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"{name} is not available on a CPU: sglang-cpu-shim only lets it be imported.")

    call.__name__ = call.__qualname__ = name.rpartition(".")[2]
    return call


def activate() -> None:
    """Replaces the allocation of SGLang's host cache of routed experts by one without pinned memory.

    The replacement keeps an int32 ``[num_tokens, num_layers, topk_size]`` buffer, as SGLang's own does.

    Raises:
        ShimError: CUDA is available, or this SGLang's ``BaseHostCache`` is not the known one.
    """
    refuse_cuda()
    import torch
    from sglang.srt.state_capturer.base import BaseHostCache

    if tuple(inspect.signature(BaseHostCache.__init__).parameters) != HOST_CACHE_PARAMETERS:
        raise ShimError("sglang-cpu-shim does not know this SGLang's BaseHostCache; install sglang 0.5.23 or update the shim.")

    def __init__(self: BaseHostCache, num_tokens: int, num_layers: int, topk_size: int, name: str, device: str) -> None:
        self.buffer = torch.zeros((num_tokens, num_layers, topk_size), dtype=torch.int32)
        self.num_tokens = num_tokens
        self.num_layers = num_layers
        self.topk_size = topk_size
        self.name = name
        self._log_allocation()

    BaseHostCache.__init__ = __init__
