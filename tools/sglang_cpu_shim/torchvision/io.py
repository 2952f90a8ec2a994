"""What transformers imports from torchvision.io."""

from enum import Enum

from sglang_cpu_shim import unavailable


class ImageReadMode(Enum):
    UNCHANGED = 0
    GRAY = 1
    GRAY_ALPHA = 2
    RGB = 3
    RGB_ALPHA = 4


decode_image = unavailable("torchvision.io.decode_image")
decode_jpeg = unavailable("torchvision.io.decode_jpeg")
