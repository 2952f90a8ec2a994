"""The files of a run, RUNS/NAME: who may write them, in which order, and what a resumed run keeps."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron_tim.errors import UserError, writing
from megatron_tim.training.event_file import EventFile
from megatron_tim.training.files import append_whole, drop_torn_line, read_json_lines, replace_whole, to_json


class RunDirectory:
    """Opens (or makes) a run directory for one writer, and mends what a kill left half-written.

    ``metrics.jsonl`` has one object a step, ``history.jsonl`` one for each start, resume or other event,
    ``summary.json`` exists when the run is complete. Every line is on the disk before a call returns. Only one
    process of a run opens it; the others need no more than the path.

    Raises:
        UserError: another process writes this run (names it), or the directory cannot be made or written.
    """

    def __init__(self, path: Path | str, tensorboard: bool = True) -> None:
        self.path = Path(path)
        self.config_path = self.path / "config.yaml"
        self.metrics_path = self.path / "metrics.jsonl"
        self.history_path = self.path / "history.jsonl"
        self.summary_path = self.path / "summary.json"
        self.rollouts = self.path / "rollouts"
        self.checkpoints = self.path / "checkpoints"
        self.hf = self.path / "hf"
        self.tensorboard = self.path / "tensorboard"
        self._write_events = tensorboard
        self._event_file: EventFile | None = None
        _make_folder(self.path)
        self._lock = _lock(self.path)
        try:
            for folder in (self.rollouts, self.checkpoints, self.hf, *([self.tensorboard] if tensorboard else [])):
                _make_folder(folder)
            self._mend(self.metrics_path)
            self._mend(self.history_path)
            rows = self.metrics()
        except BaseException:
            self.close()
            raise
        self._last_step: int = rows[-1]["step"] if rows else -1

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Lets another process open the directory; every line is already on the disk."""
        self._lock.close()

    def rollout_path(self, step: int) -> Path:
        """Where the trajectories of ``step`` are saved."""
        return self.rollouts / f"step_{step:06d}.parquet"

    def metrics(self) -> list[dict[str, Any]]:
        """The rows of ``metrics.jsonl``, oldest first.

        Raises:
            UserError: a line is damaged (names it).
        """
        return read_json_lines(self.metrics_path, key="step")

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends the row of ``step`` to ``metrics.jsonl`` and to TensorBoard's curves.

        A value that is NaN or infinite is written as null and its name listed under ``nonfinite``.

        Raises:
            ValueError: ``step`` does not come after the last row's.
            UserError: the disk is full or the file may not be written; no line is then half-written.
        """
        if step <= self._last_step:
            raise ValueError(f"metrics of step {step} after those of step {self._last_step}: call truncate_after first")
        append_whole(self.metrics_path, to_json({"step": step, **metrics}))
        self._last_step = step
        if self._write_events:
            self._event_file = self._event_file or EventFile(self.tensorboard, first_step=step)
            self._event_file.write(step, metrics)

    def truncate_after(self, step: int) -> None:
        """Goes back to ``step``: later rows leave ``metrics.jsonl``, and ``summary.json`` goes, because the run is no longer complete.

        Step 0 is the start, before the evaluation that has the row of step 0: no row stays.

        The files of later rollouts stay until the resumed run writes them anew.

        Raises:
            UserError: the disk is full or a file may not be written; the rows are then all still there.
        """
        rows = self.metrics()
        kept = [row for row in rows if 0 < step >= row["step"]]
        if len(kept) < len(rows):
            replace_whole(self.metrics_path, b"".join(map(to_json, kept)))
        with writing(self.summary_path):
            self.summary_path.unlink(missing_ok=True)
        self._last_step = kept[-1]["step"] if kept else -1
        self._event_file = None

    def record(self, event: str, **details: Any) -> None:
        """Appends what happened to ``history.jsonl``: ``record("resume", step=10)``; the time is UTC.

        Raises:
            UserError: the disk is full or the file may not be written.
        """
        time = datetime.now(UTC).isoformat(timespec="seconds")
        append_whole(self.history_path, to_json({"time": time, "event": event, **details}))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Writes ``summary.json``, the mark of a complete run.

        Raises:
            UserError: the disk is full or the file may not be written; a former summary is then untouched.
        """
        replace_whole(self.summary_path, to_json(summary, indent=2))

    def _mend(self, path: Path) -> None:
        torn = drop_torn_line(path)
        if torn:
            self.record("torn line dropped", file=path.name, bytes=torn)


def _make_folder(path: Path) -> None:
    try:
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"{path} cannot be a folder: a file is in its place; remove it or choose another run.name or run.dir.") from None


def _lock(path: Path) -> FileIO:
    """Locks the directory for this process and returns the open lock file; the lock ends with it, a kill included."""
    with ExitStack() as on_error:
        try:
            with writing(path / ".lock"):
                file = on_error.enter_context(open(path / ".lock", "a+b", buffering=0))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with writing(path / ".lock"):
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        except BlockingIOError:
            file.seek(0)
            holder = file.read(200).decode(errors="replace") or "another process"
            raise UserError(f"{path} is being written by {holder}; wait for it, stop it, or choose another run.name.") from None
        except OSError as error:
            raise UserError(f"{path} cannot be locked ({error.strerror}); put run.dir on a writable file system with locks.") from None
        on_error.pop_all()
    return file
