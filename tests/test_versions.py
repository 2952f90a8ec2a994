"""The versions that the code calls tested are those that set-up installs."""

from pathlib import Path

from megatron_tim.megatron.platform import SUPPORTED_MEGATRON, TESTED_MEGATRON
from megatron_tim.rollout.launch import TESTED_VERSION


def pins():
    found = {}
    for path in Path("launch/requirements").glob("*.txt"):
        for line in path.read_text().splitlines():
            name, separator, version = line.partition("==")
            if separator:
                found.setdefault(name.strip().lower(), set()).add(version.split()[0])
    return found


def test_megatron_core_is_the_tested_one():
    assert pins()["megatron-core"] <= set(TESTED_MEGATRON)
    assert all(version.rpartition(".")[0] in SUPPORTED_MEGATRON for version in TESTED_MEGATRON)


def test_sglang_is_the_tested_one():
    assert pins()["sglang"] == {TESTED_VERSION}
