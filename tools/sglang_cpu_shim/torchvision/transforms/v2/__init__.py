"""torchvision.transforms.v2, of which only ``functional`` is imported."""

from torchvision.transforms import InterpolationMode, functional

__all__ = ["InterpolationMode", "functional"]
