"""What a person at the terminal sees of a run: a row a step, the phase that runs now, the checks before and the summary after.

On a terminal the running phase ticks in the last line. Elsewhere (a file, a pipe, NO_COLOR) there are plain lines
and no control codes, so that a log can be read and searched.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from megatron_tim.training.console_format import HEADER, LEGEND, duration, evaluation_line, preflight_table, step_row, summary_panel

HEADER_EVERY = 25
PLAIN_PROGRESS_SECONDS = 10.0


class RunConsole:
    """Prints a run of ``steps`` steps; use it as a context manager, so that a failure leaves the terminal in order.

    Args:
        steps: the last step of the run.
        stream: where to print; standard output by default.
        quiet: print nothing, for the ranks other than 0.
    """

    def __init__(self, steps: int, stream: TextIO | None = None, quiet: bool = False) -> None:
        stream = stream or sys.stdout
        self._live_wanted = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        width = None if self._live_wanted else 100
        self._console = Console(file=stream, force_terminal=self._live_wanted, no_color=not self._live_wanted, width=width, quiet=quiet)
        self._steps = steps
        self._rows = 0
        self._live: Live | None = None
        self._plain_progress_at = float("-inf")

    def __enter__(self) -> RunConsole:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._clear()

    def say(self, text: str) -> None:
        """Prints a line that stays."""
        self._print(text)

    def progress(self, text: str) -> None:
        """Says what long work is at: in the last line of a terminal, elsewhere as a line at most every ten seconds."""
        if self._live_wanted:
            self._show(text)
        elif time.monotonic() - self._plain_progress_at >= PLAIN_PROGRESS_SECONDS:
            self._plain_progress_at = time.monotonic()
            self._print(text)

    def phase(self, step: int, name: str) -> None:
        """Shows on a terminal that phase ``name`` of ``step`` runs, and for how long it has, until something else is shown."""
        if self._live_wanted:
            self._show(f"step {step}/{self._steps}  {name}")

    def step(self, metrics: Mapping[str, float | None]) -> None:
        """Prints the row of a finished step, under a header where one is due, and its evaluation when there was one."""
        if self._rows == 0:
            self._print(LEGEND, style="dim")
        if self._rows == 0 or self._live_wanted and self._rows % HEADER_EVERY == 0:
            for line in HEADER:
                self._print(line, style="bold")
        self._rows += 1
        self._print(step_row(metrics))
        self.evaluation(metrics)

    def evaluation(self, metrics: Mapping[str, float | None]) -> None:
        """Prints what an evaluation found."""
        line = evaluation_line(metrics)
        if line is not None:
            self._print(line, style="green")

    def preflight(self, result: Mapping[str, Any]) -> None:
        """Prints the comparison of server and trainer before step 1 (keys: :func:`.preflight_rows`)."""
        self._clear()
        self._print("Preflight: the trainer scores tokens that the server sampled.", style="bold")
        self._console.print(preflight_table(result))

    def summary(self, summary: Mapping[str, Any]) -> None:
        """Prints how the run went, where its files are and what to try next (keys: :func:`.summary_panel`, ``files`` and ``next``)."""
        self._clear()
        self._console.print(summary_panel(summary))
        for label, path in summary.get("files", {}).items():
            self._print(f"  {label:<10} {path}")
        for command in summary.get("next", []):
            self._print(f"  {'try next':<10} {command}", style="bold")

    def _print(self, text: str, style: str | None = None) -> None:
        # No wrapping: a terminal folds a long path or command itself, and it can still be copied as one line.
        self._console.print(text, style=style, soft_wrap=True, markup=False, highlight=False)

    def _show(self, text: str) -> None:
        if self._live is None:
            self._live = Live(console=self._console, transient=True, refresh_per_second=4)
            self._live.start()
        self._live.update(_Ticking(text), refresh=True)

    def _clear(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


class _Ticking:
    """A spinner, a text and the time since it was first shown, drawn anew at each refresh."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._started = time.monotonic()
        self._spinner = Spinner("line")

    def __rich__(self) -> Spinner:
        self._spinner.update(text=Text(f"{self._text}  {duration(time.monotonic() - self._started)}", no_wrap=True, overflow="ellipsis"))
        return self._spinner
