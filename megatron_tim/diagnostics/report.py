"""``report.html``: a run for people, from the files in its directory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2
import yaml

from megatron_tim import __version__
from megatron_tim.diagnostics.charts import run_charts
from megatron_tim.diagnostics.report_page import TEMPLATE
from megatron_tim.diagnostics.run_summary import findings, summarise_run, window
from megatron_tim.errors import UserError
from megatron_tim.training import metric_names as names
from megatron_tim.training.console_format import comparison_rows, percent, preflight_rows
from megatron_tim.training.files import read_json_lines, replace_whole

MARKS = {"good": "\u2713", "neutral": "\u2022", "bad": "!"}


def write_report(run_path: Path | str) -> Path:
    """Writes ``report.html`` into a run directory, finished or not, and returns its path.

    It reads ``metrics.jsonl`` and, where they exist, ``config.yaml``, ``history.jsonl`` (starts and resumes) and
    ``summary.json``, whose numbers go before those computed from the rows. The page is one file without scripts that
    loads nothing from elsewhere.

    Raises:
        UserError: the directory holds no metrics, one of the files is damaged, or the report cannot be written.
    """
    path = Path(run_path)
    rows = read_json_lines(path / "metrics.jsonl", key="step")
    if not rows:
        raise UserError(f"{path / 'metrics.jsonl'} holds no steps to report; name the directory of a run, such as runs/NAME.")
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(TEMPLATE)
    html = template.render(_page(path, rows))
    report = path / "report.html"
    replace_whole(report, html.encode())
    return report


def _page(path: Path, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Everything that the template names."""
    config = _read(path / "config.yaml", yaml.safe_load)
    written_summary = _read(path / "summary.json", json.loads)
    history = read_json_lines(path / "history.jsonl", key="event")
    summary = summarise_run(rows) | {key: value for key, value in written_summary.items() if value is not None}
    resumed_after = [event["step"] for event in history if event["event"] == "resume" and "step" in event]
    length = window(summary["steps"])
    return {
        "name": path.resolve().name,
        "model": config.get("model", {}).get("hf_path"),
        "written": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "version": __version__,
        "findings": findings(summary, config, complete=bool(written_summary)),
        "marks": MARKS,
        "comparison": comparison_rows(summary),
        "ends": "first and last step" if length == 1 else f"first and last {length} steps",
        "charts": run_charts(rows, resumed_after, config.get("evaluation", {}).get("problems")),
        "resumed_after": resumed_after,
        "phases": _phases(summary),
        "preflight": _preflight(rows),
        "history": [_history_row(event) for event in history],
        "configuration": [(section, list(_entries(section, values))) for section, values in config.items()],
        "files": path / "metrics.jsonl",
    }


def _read(path: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    """A file with one mapping; no file gives an empty one."""
    if not path.exists():
        return {}
    try:
        tree = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read: {' '.join(str(error).split())}.") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path} is damaged: it must hold keys and values, found {type(tree).__name__}.")
    return tree


def _preflight(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Labels and values of the last preflight; a resumed run makes another."""
    for row in reversed(rows):
        result = {name.removeprefix(names.PREFLIGHT): value for name, value in row.items() if name.startswith(names.PREFLIGHT)}
        if result:
            return preflight_rows(result)
    return []


def _phases(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Name and share of each phase, and of the rest of the steps."""
    shares = summary["phase_shares"]
    if not shares:
        return []
    return [(phase, percent(share)) for phase, share in (shares | {"between phases": max(0.0, 1 - sum(shares.values()))}).items()]


def _history_row(event: Mapping[str, Any]) -> tuple[str, str, str]:
    details = (f"{key}: {value}" for key, value in event.items() if key not in ("time", "event"))
    return str(event.get("time", "")).removesuffix("+00:00").replace("T", " "), event["event"], ", ".join(details)


def _entries(section: str, values: Any) -> Iterator[tuple[str, Any]]:
    """Keys and values of a section; the server's environment may hold secrets, and a report is passed around."""
    if not isinstance(values, Mapping):
        yield "", values
        return
    for key, value in values.items():
        if (section, key) == ("rollout", "env") and isinstance(value, Mapping):
            value = dict.fromkeys(value, "(not shown)")
        yield key, "(none)" if value is None else value
