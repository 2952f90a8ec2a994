"""The one place that makes Megatron-Core run without a GPU: what is patched, and why.

Megatron-Core asks for CUDA devices, streams, random states and tensor types by name. Three groups
of patches answer with CPU ones: ``torch.cuda`` itself, tensor factories that are given a CUDA
device, and the few Megatron functions whose code cannot take a CPU tensor. They are installed only
when CUDA is absent, before ``megatron.core`` is imported, and change no arithmetic.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._device

from megatron_tim.errors import UserError

_CPU = torch.device("cpu")
_FACTORIES = (
    "arange as_tensor empty empty_like eye full full_like linspace ones ones_like rand randint randn tensor zeros zeros_like".split()
)


def install() -> None:
    """Patches ``torch`` for a CPU-only process, then imports and patches ``megatron.core``."""
    _patch_cuda_module()
    _patch_factories()
    _patch_tensor_moves()
    _patch_barrier()
    _patch_megatron()


class _Event:
    """A CUDA event on a machine where everything is already complete."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, *args: Any, **kwargs: Any) -> None: ...

    def wait(self, *args: Any, **kwargs: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _Event) -> float:
        return 0.0


class _Stream:
    """A CUDA stream on a machine that computes in program order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: _Stream) -> None: ...

    def wait_event(self, event: _Event) -> None: ...

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def synchronize(self) -> None: ...


def _always(result: Any) -> Callable[..., Any]:
    """A function that returns ``result`` whatever it is given: a CUDA call with nothing to do on a CPU.

    Each patched name gets one of its own, because torch's compiler refuses one function under two names.
    """
    return lambda *args, **kwargs: result


def _patch_cuda_module() -> None:
    cuda, stream = torch.cuda, _Stream()
    answers = {"current_device": _CPU, "device_count": 1, "current_stream": stream, "default_stream": stream}
    answers |= dict.fromkeys(("set_device", "synchronize", "empty_cache"))
    answers |= dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), 0)
    for name, result in answers.items():
        setattr(cuda, name, _always(result))
    cuda.nvtx.range_push, cuda.nvtx.range_pop = _always(None), _always(None)
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.stream = lambda stream: contextlib.nullcontext()
    # Megatron keeps named generators by swapping the device's state; here that is the CPU's generator.
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed) and None
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.random.get_rng_state = lambda device=None: torch.get_rng_state()


def _names_cuda(device: Any) -> bool:
    if isinstance(device, int) and not isinstance(device, bool):
        return True
    if isinstance(device, str):
        return device.startswith("cuda")
    return getattr(device, "type", None) == "cuda"


def _patch_factories() -> None:
    def on_cpu(factory):
        @functools.wraps(factory)
        def wrapped(*args, **kwargs):
            if _names_cuda(kwargs.get("device")):
                kwargs["device"] = _CPU
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
            return factory(*args, **kwargs)

        return wrapped

    # `with torch.device(...)` (transformers loads models so) knows the factories by identity and
    # remembers them at its first use: it must remember the originals, which the wrappers call.
    torch.utils._device._device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))


def _patch_tensor_moves() -> None:
    move = torch.Tensor.to

    @functools.wraps(move)
    def to(self, *args, **kwargs):
        if args and not isinstance(args[0], (torch.dtype, torch.Tensor)) and _names_cuda(args[0]):
            args = (_CPU, *args[1:])
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return move(self, *args, **kwargs)

    torch.Tensor.to = to
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self

    type_of = torch.Tensor.type

    @functools.wraps(type_of)
    def tensor_type(self, *args, **kwargs):
        """Megatron's optimizers compare ``param.type()`` with 'torch.cuda.FloatTensor' and refuse the rest."""
        result = type_of(self, *args, **kwargs)
        asks_for_name = not args and not kwargs
        if asks_for_name and "megatron.core.optimizer" in sys._getframe(1).f_globals.get("__name__", ""):
            return result.replace("torch.", "torch.cuda.")
        return result

    torch.Tensor.type = tensor_type


def _patch_barrier() -> None:
    """gloo refuses ``device_ids``, which Megatron passes for NCCL's sake."""
    barrier = torch.distributed.barrier

    @functools.wraps(barrier)
    def wrapped(group=None, async_op=False, device_ids=None):
        return barrier(group=group, async_op=async_op)

    torch.distributed.barrier = wrapped


def _patch_megatron() -> None:
    with _no_compile():
        import megatron.core.tensor_parallel.random as random
        import megatron.core.transformer.moe.moe_utils as moe_utils
        import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    _require_parameters(random._get_cuda_rng_state, "device", "clone", "graph_safe")
    _require_parameters(random._set_cuda_rng_state, "new_state", "device", "graph_safe")
    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)

    # 0.16 reads this name, which exists only beside Transformer Engine, in the router's fp32 GEMM.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None

    # The alltoall dispatcher needs its split sizes as numbers; upstream converts only CUDA tensors.
    _require_parameters(moe_utils.maybe_move_tensor_to_cpu, "tensor", "as_numpy", "record_stream")

    def maybe_move_tensor_to_cpu(tensor, as_numpy=False, record_stream=False):
        return tensor.detach().numpy() if torch.is_tensor(tensor) and as_numpy else tensor

    moe_utils.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu
    token_dispatcher.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu


@contextlib.contextmanager
def _no_compile() -> Iterator[None]:
    """Megatron decorates its fusions with ``torch.compile`` at import; eager is their meaning, and starts at once."""
    compile_ = torch.compile
    torch.compile = lambda model=None, **kwargs: model if model is not None else lambda model: model
    try:
        yield
    finally:
        torch.compile = compile_


def _require_parameters(function: Any, *names: str) -> None:
    """Refuses to replace a private function whose parameters are not those we know."""
    found = tuple(inspect.signature(function).parameters)
    if found != names:
        raise UserError(
            f"this megatron-core defines {function.__module__}.{function.__name__}{found}, expected {names}:"
            " the CPU patches do not fit it; install the tested version with launch/setup.sh."
        )
