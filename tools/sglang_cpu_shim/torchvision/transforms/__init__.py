"""What SGLang and transformers import from torchvision.transforms; any other name is a transform that raises when made."""

from enum import Enum

from sglang_cpu_shim import unavailable


class InterpolationMode(Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


# After InterpolationMode, which they import from here.
from torchvision.transforms import functional, v2  # noqa: E402

__all__ = ["InterpolationMode", "functional", "v2"]


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)
    return unavailable(f"torchvision.transforms.{name}")
