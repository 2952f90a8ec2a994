"""What is imported from torchvision.transforms.functional, which is the enum and functions that raise when called."""

from sglang_cpu_shim import unavailable

from torchvision.transforms import InterpolationMode

__all__ = ["InterpolationMode"]


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)
    return unavailable(f"torchvision.transforms.functional.{name}")
