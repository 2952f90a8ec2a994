"""The command ``megatron-tim``: reads the arguments, runs one subcommand, and turns a UserError into one sentence."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import megatron_tim
from megatron_tim.cli import convert, doctor, train
from megatron_tim.cli.processes import USER_ERROR_STATUS
from megatron_tim.errors import UserError

# In the order of --help. Importing one must stay cheap: torch and the engines are imported in its run().
COMMANDS = (train, convert, doctor)

INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    """Tells a mistake as one sentence, like every other; the usage is in --help."""

    def error(self, message: str) -> NoReturn:
        self.exit(USER_ERROR_STATUS, f"megatron-tim: error: {message}; see {self.prog} --help.\n")


def make_parser() -> argparse.ArgumentParser:
    """Builds the parser; each subcommand leaves its ``run`` in the parsed arguments."""
    parser = _Parser(prog="megatron-tim", description=megatron_tim.__doc__)
    parser.add_argument("--version", action="version", version=f"%(prog)s {megatron_tim.__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(subparsers).set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status: 0, what the subcommand returns, 2 (user's mistake) or 130 (Ctrl-C)."""
    args = make_parser().parse_args(argv)
    try:
        status = args.run(args) or 0
        sys.stdout.flush()
        return status
    except UserError as error:
        print(f"megatron-tim: error: {error}", file=sys.stderr)
        return USER_ERROR_STATUS
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has gone; the interpreter's own flush at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
