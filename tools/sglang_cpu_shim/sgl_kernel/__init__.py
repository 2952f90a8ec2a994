"""Stands in for SGLang's kernel package on a CPU: the ``*_cpu`` names import, and raise when called."""

from sglang_cpu_shim import refuse_cuda, unavailable

refuse_cuda()

__version__ = "0.0.0+cpu.shim"


def __getattr__(name: str) -> object:
    if name.endswith("_cpu"):
        return unavailable(f"sgl_kernel.{name}")
    raise AttributeError(f"sgl_kernel of sglang-cpu-shim has no {name}")
