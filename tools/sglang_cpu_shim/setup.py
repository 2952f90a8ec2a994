"""Packaging of the SGLang CPU shim; the torchvision stub goes in only where the real one is absent."""

from importlib.metadata import PackageNotFoundError, version

from setuptools import setup

PACKAGES = ["sgl_kernel", "sglang_cpu_shim"]
TORCHVISION_STUB = ["torchvision", "torchvision.transforms", "torchvision.transforms.v2"]


def torchvision_is_installed() -> bool:
    """Asks the metadata, not the import system: the stub of an earlier install has none under this name."""
    try:
        version("torchvision")
    except PackageNotFoundError:
        return False
    return True


setup(
    name="sglang-cpu-shim",
    version="0.3",
    description="Lets the CUDA build of SGLang from the package index serve on a machine without a GPU.",
    python_requires=">=3.11",
    packages=PACKAGES if torchvision_is_installed() else PACKAGES + TORCHVISION_STUB,
    entry_points={"sglang.srt.plugins": ["cpu_shim = sglang_cpu_shim:activate"]},
)
