"""The pinned requirement files: complete pins, no package where it would do harm, and one version of a package."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REQUIREMENTS = sorted((ROOT / "launch" / "requirements").glob("*.txt"))
OUR_OWN = {"megatron_tim", "tests", "new_folder", "make_arithmetic", "make_tiny_model", "sglang_cpu_shim", "sgl_kernel", "torchvision"}


def pins(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith(("#", "-"))]
    found = [re.fullmatch(r"([\w.-]+)(?:\[[\w,]+\])?==(\S+)", line) for line in lines]
    assert None not in found, f"{path.name} has a line without an exact version"
    return {match[1].lower(): match[2] for match in found}


@pytest.mark.parametrize("path", REQUIREMENTS, ids=lambda path: path.name)
def test_every_line_is_pinned_and_sources_are_not_named(path: Path) -> None:
    assert pins(path)
    assert "://" not in path.read_text()


def test_one_version_of_a_package_everywhere() -> None:
    seen: dict[str, str] = {}
    for path in REQUIREMENTS:
        for name, version in pins(path).items():
            assert seen.setdefault(name, version) == version, name


def test_the_cpu_set_has_no_package_that_needs_a_gpu() -> None:
    names = {name for path in REQUIREMENTS if not path.name.startswith("gpu") for name in pins(path)}
    assert not names & {"torchvision", "torchaudio", "transformer-engine", "sglang-kernel", "flashinfer-python"}


def imported(folder: str) -> set[str]:
    """The top-level names that the Python files of a folder import, wherever in the file."""
    names: set[str] = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names.add(node.module)
    return {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) - OUR_OWN


def distributions_of(names: set[str]) -> dict[str, set[str]]:
    known = importlib.metadata.packages_distributions()
    return {name: {distribution.lower() for distribution in known.get(name, ())} for name in names}


@pytest.mark.parametrize("folder", ["megatron_tim", "tests", "tools"])
def test_whatever_is_imported_is_pinned(folder: str) -> None:
    pinned = {name for path in REQUIREMENTS if not path.name.startswith("gpu") for name in pins(path)}
    missing = [name for name, distributions in distributions_of(imported(folder)).items() if not distributions & pinned]
    assert not missing


def test_whatever_the_package_imports_is_required_by_setup_py() -> None:
    required = set(re.findall(r'^        "([\w-]+)', (ROOT / "setup.py").read_text(), re.MULTILINE)) | {"sglang"}  # the extra [gpu]
    missing = [name for name, distributions in distributions_of(imported("megatron_tim")).items() if not distributions & required]
    assert not missing
