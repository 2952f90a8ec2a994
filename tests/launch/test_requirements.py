"""The pinned requirement files: complete pins, no package where it would do harm, and one version of a package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REQUIREMENTS = sorted((Path(__file__).parents[2] / "launch" / "requirements").glob("*.txt"))


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
