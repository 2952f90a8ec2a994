"""The command line as a user meets it: help at once, one sentence for a mistake, quiet on Ctrl-C."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

import megatron_tim
from megatron_tim.cli import doctor
from megatron_tim.cli.main import COMMANDS, main
from megatron_tim.errors import UserError


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "megatron_tim", *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL)


def test_help_lists_the_commands_without_importing_what_is_heavy() -> None:
    code = (
        "import sys\nfrom megatron_tim.cli.main import main\ntry: main(['--help'])\n"
        "finally: print([name for name in ('torch', 'transformers', 'megatron', 'sglang', 'pyarrow') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.endswith("[]\n")
    for command in ("train", "convert", "doctor"):
        assert command in done.stdout


def test_help_is_quick() -> None:
    def seconds() -> float:
        started = time.monotonic()
        run("--help")
        return time.monotonic() - started

    assert min(seconds() for _ in range(5)) < 0.5


@pytest.mark.parametrize("command", [command.__name__.rpartition(".")[2] for command in COMMANDS])
def test_every_command_has_help_with_an_example(command: str) -> None:
    done = run(command, "--help")
    assert done.returncode == 0
    assert f"megatron-tim {command}" in done.stdout
    assert "example" in done.stdout


def test_version() -> None:
    assert run("--version").stdout == f"megatron-tim {megatron_tim.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["explode"], ["doctor", "--jsno"]])
def test_a_wrong_command_line_is_refused_without_a_traceback(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert "error:" in done.stderr and "Traceback" not in done.stderr


def test_a_users_mistake_is_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(args):
        raise UserError("key 'run.stpes' is unknown.")

    monkeypatch.setattr(doctor, "run", run)
    assert main(["doctor"]) == 2
    assert capsys.readouterr() == ("", "megatron-tim: error: key 'run.stpes' is unknown.\n")


def test_ctrl_c_is_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "run", run)
    assert main(["doctor"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_defect_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(args):
        raise ZeroDivisionError

    monkeypatch.setattr(doctor, "run", run)
    with pytest.raises(ZeroDivisionError):
        main(["doctor"])


def test_a_reader_that_goes_away_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-m", "megatron_tim", "doctor", "--json"], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
