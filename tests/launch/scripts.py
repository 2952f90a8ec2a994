"""Runs copies of the launch scripts with a Python, pip, df and nvidia-smi that only pretend, so nothing is downloaded."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Answers setup.sh's question for the version; "makes" environments; notes each pip call in $FAKE_LOG.
FAKE_PYTHON = """#!/bin/bash
case "$*" in
    "-c import sys; print(sys._base_executable)") echo "$FAKE_BIN/python3.11" ;;
    -c*) echo "${FAKE_VERSION:-3.11}" ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && printf '#!/bin/bash\\nprintf "%%s\\n" "$@"\\n' >"$3/bin/megatron-tim" &&
        chmod +x "$3/bin/megatron-tim" ;;
    "-m pip "*) echo "pip ${*:3}" >>"$FAKE_LOG"
        sleep "${FAKE_PIP_SECONDS:-0}"
        if [ -n "${FAKE_PIP_ERROR:-}" ]; then echo "ERROR: $FAKE_PIP_ERROR"; exit 1; fi
        echo "Would install torch-2.13.0${FAKE_TORCH_BUILD-+cpu}" ;;
    "-m compileall "*) ;;
    tools/*) echo "$*" >>"$FAKE_LOG"; mkdir -p "$3" ;;
    *) echo "unexpected: $*" >&2; exit 99 ;;
esac
"""
FAKE_DF = """#!/bin/bash
printf 'Filesystem 1024-blocks Used Available Capacity Mounted\\ndisk 0 0 %d 0%% /\\n' $(($FAKE_FREE_GB * 1024 * 1024))
"""
SYSTEM_TOOLS = "bash env dirname basename sed cut paste awk flock cat sha256sum find sort grep rm mkdir mv cp chmod sleep du head".split()


class Scripts:
    """A copy of the launch scripts in a folder of its own, and a PATH that holds only what is put there."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "repository"
        self.bin = folder / "bin"
        self.log = folder / "calls.log"
        self.bin.mkdir(parents=True)
        shutil.copytree(ROOT / "launch", self.root / "launch")
        shutil.copytree(ROOT / "tools" / "sglang_cpu_shim", self.root / "tools" / "sglang_cpu_shim")
        shutil.copy(ROOT / "setup.py", self.root)
        for tool in SYSTEM_TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool))
        self.add("df", FAKE_DF)
        self.add("python3.11", FAKE_PYTHON)

    def add(self, name: str, text: str) -> None:
        """Puts an executable script on the PATH."""
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)

    def start(self, script: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        fakes = {"FAKE_BIN": str(self.bin), "FAKE_LOG": str(self.log), "FAKE_FREE_GB": "100", "MEGATRON_TIM_DEVICE": "cpu"}
        return subprocess.Popen(
            [str(self.root / "launch" / script), *arguments],
            env={"PATH": str(self.bin), "HOME": os.environ.get("HOME", "/"), **fakes, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        process = self.start(script, *arguments, **environment)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def calls(self) -> list[str]:
        """The pip and tool calls since the last time this was asked."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.write_text("")
        return lines
