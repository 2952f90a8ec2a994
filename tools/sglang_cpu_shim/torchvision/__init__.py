"""Stands in for torchvision where there is none: SGLang and transformers import it for images, nothing here uses it."""

from torchvision import io, transforms

__version__ = "0.0.0+cpu.shim"
__all__ = ["io", "transforms"]
