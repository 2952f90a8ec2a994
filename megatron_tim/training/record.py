"""What a run leaves behind and shows: its directory and its console, on rank 0; silent on the others."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

from megatron_tim.config import Config, changed_keys, save_config
from megatron_tim.diagnostics.run_summary import summarise_run
from megatron_tim.rollout.records import save_trajectories
from megatron_tim.rollout.trajectory import Trajectory
from megatron_tim.training import metric_names as names
from megatron_tim.training.console import RunConsole
from megatron_tim.training.preflight import Preflight
from megatron_tim.training.run_directory import RunDirectory


class RunRecord:
    """Writes and prints a run. Every rank holds one; only rank 0's has a directory and speaks.

    Raises:
        UserError: the directory is in use or cannot be written.
    """

    def __init__(self, config: Config, is_main: bool) -> None:
        self._config = config
        self.console = RunConsole(config.run.steps, quiet=not is_main)
        self._directory: RunDirectory | None = None
        self._is_new, self._changes = True, []
        if is_main:
            self._directory = RunDirectory(config.run.path, config.run.tensorboard)
            self._is_new = not self._directory.config_path.is_file()
            self._changes = changed_keys(self._directory.config_path, config)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self.console)
            if self._directory is not None:
                stack.enter_context(self._directory)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.__exit__(*exception)

    def has_same(self, *prefixes: str) -> bool:
        """Whether an earlier start of this run had the same configuration under these keys (rank 0 knows)."""
        return not self._is_new and not any(change.startswith(prefixes) for change in self._changes)

    def begin(self, step: int) -> None:
        """Goes back to ``step`` and notes the start, or the resume and what the configuration changed, in the run's history."""
        if self._directory is None:
            return
        self._directory.truncate_after(step)
        self._directory.record("resume" if step else "start", step=step, changed=self._changes)
        save_config(self._config, self._directory.config_path)  # last: a start that is refused changes nothing
        if step:
            self.console.say(f"Resumed after step {step} of {self._config.run.steps}.")
        if self._changes:
            self.console.say(f"The configuration differs from the earlier start's: {', '.join(self._changes)}.")

    @contextmanager
    def step(self, number: int) -> Iterator[StepMetrics]:
        """Collects the metrics of a step; at its end they are written and printed."""
        metrics = StepMetrics(number, self.console)
        yield metrics
        metrics.finish()
        self.write(number, metrics.values)
        self.console.step({"step": number, **metrics.values})

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends a row to metrics.jsonl and TensorBoard."""
        if self._directory is not None:
            self._directory.log_metrics(step, metrics)

    def trajectories(self, step: int, trajectories: list[Trajectory]) -> None:
        """Saves the rollout batch of a step."""
        if self._directory is not None:
            save_trajectories(self._directory.rollout_path(step), trajectories)

    def preflight(self, result: Preflight) -> None:
        """Prints the comparison of the two engines."""
        self.console.preflight(vars(result))

    def finish(self) -> None:
        """Writes summary.json and report.html and prints how the run went."""
        if self._directory is None:
            return
        path: Path = self._config.run.path
        # The plotting library takes a second to import, and only here is it needed.
        from megatron_tim.diagnostics.report import write_report

        summary = {"name": self._config.run.name, **summarise_run(self._directory.metrics())}
        self._directory.write_summary(summary)
        write_report(path)
        files = {
            "report": path / "report.html",
            "metrics": path / "metrics.jsonl",
            "rollouts": path / "rollouts",
            "model": path / "hf" / "final",
            "curves": f"tensorboard --logdir {path / 'tensorboard'}",
        }
        self.console.summary(summary | {"files": files, "next": [_next_command(self._config)]})


def _next_command(config: Config) -> str:
    """The same job with the other answer to its main question: corrected or not."""
    method = "none" if config.correction.method != "none" else "cis"
    program = Path(sys.executable).with_name("megatron-tim")
    if not program.exists():
        program = Path("megatron-tim")
    if program.is_relative_to(Path.cwd()):
        program = program.relative_to(Path.cwd())
    return f"{program} train --config {config.run.path / 'config.yaml'} run.name={config.run.name}-{method} correction.method={method}"


class StepMetrics:
    """The metrics of one step, and the seconds of its phases."""

    def __init__(self, number: int, console: RunConsole) -> None:
        self.values: dict[str, float] = {}
        self._number, self._console, self._started = number, console, time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times a phase under ``seconds/NAME`` and shows that it runs."""
        self._console.phase(self._number, name)
        started = time.perf_counter()
        yield
        self.values[names.phase_seconds(name)] = time.perf_counter() - started

    def add(self, metrics: Mapping[str, float]) -> None:
        """Adds metrics by name."""
        self.values.update(metrics)

    def finish(self) -> None:
        """Closes the step's clock and forms the sampling rate over the whole step."""
        seconds = time.perf_counter() - self._started
        self.values[names.STEP_SECONDS] = seconds
        if "rollout/tokens" in self.values:
            self.values[names.TOKENS_PER_S] = self.values["rollout/tokens"] / seconds
