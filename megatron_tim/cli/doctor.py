"""``megatron-tim doctor``: what is installed, what this machine can run, and what to do about what it cannot."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING

from megatron_tim.environment import Check, Package, checks, packages

if TYPE_CHECKING:
    from rich.table import Table

COLOURS = {"ok": "green", "warning": "yellow", "problem": "red"}
EPILOG = """example:
  megatron-tim doctor
  megatron-tim doctor --json | jq '.checks[] | select(.status != "ok")'

exit status: 0 when a run can start here, 1 when a problem stands in its way
"""


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "doctor",
        help="check the installation and the machine",
        description=__doc__.replace("``", ""),
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    return parser


def run(args: argparse.Namespace) -> int:
    """Prints the findings; returns 1 if one of them is a problem."""
    found, installed = checks(), packages()
    ready = all(check.status != "problem" for check in found)
    if args.json:
        print_json(found, installed, ready)
    else:
        print_tables(found, installed, ready)
    return 0 if ready else 1


def print_json(found: list[Check], installed: list[Package], ready: bool) -> None:
    listed = [{**dataclasses.asdict(package), "is_tested": package.is_tested} for package in installed]
    print(json.dumps({"ready": ready, "checks": [dataclasses.asdict(check) for check in found], "packages": listed}, indent=2))


def print_tables(found: list[Check], installed: list[Package], ready: bool) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.print(package_table(installed))
    console.print(check_table(found))
    for check in found:
        if check.advice:
            console.print(f"{check.name}: {check.advice}", style=COLOURS[check.status], markup=False)
    console.print("ready to run" if ready else "not ready to run", style="bold green" if ready else "bold red")


def package_table(installed: list[Package]) -> Table:
    from rich.table import Table

    table = Table("package", "installed", "tested", box=None, header_style="bold", pad_edge=False)
    for package in installed:
        colour = COLOURS["ok" if package.is_tested else "warning" if package.version else "problem"]
        table.add_row(package.name, f"[{colour}]{package.version or 'missing'}[/]", package.tested or "-")
    return table


def check_table(found: list[Check]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table("check", "state", "finding", box=None, header_style="bold", pad_edge=False)
    for check in found:
        table.add_row(check.name, f"[{COLOURS[check.status]}]{check.status}[/]", escape(check.detail))
    return table
