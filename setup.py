"""Packaging. Exact, tested versions are in launch/requirements; here is what any environment must have."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def pinned(name: str) -> list[str]:
    """The requirements of launch/requirements/NAME.txt itself, without the files that it includes."""
    lines = (ROOT / "launch" / "requirements" / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith(("#", "-"))]


VERSION = re.search(r'^__version__ = "(.+)"$', (ROOT / "megatron_tim" / "__init__.py").read_text(encoding="utf-8"), re.MULTILINE)[1]

setup(
    name="megatron_tim",
    version=VERSION,
    description="Measure and correct the training-inference mismatch of mixture-of-experts RL on Megatron-Core.",
    python_requires=">=3.11,<3.13",
    packages=find_packages(include=["megatron_tim", "megatron_tim.*"]),
    install_requires=[
        "jinja2",
        "matplotlib",
        "megatron-core>=0.16.1,<0.20",
        "numpy",
        "psutil",
        "pyarrow",
        "pydantic>=2.7",
        "pyyaml",
        "requests",
        "rich",
        "safetensors",
        "tensorboard",
        "tokenizers",
        "torch>=2.6",
        "transformers>=4.57",
    ],
    extras_require={"gpu": pinned("gpu") + pinned("gpu-build"), "dev": pinned("dev")},
    entry_points={"console_scripts": ["megatron-tim = megatron_tim.cli.main:main"]},
)
