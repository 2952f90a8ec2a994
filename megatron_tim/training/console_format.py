"""A run's numbers as text: plain dictionaries in, lines and rich tables out. A missing number is '-'."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.panel import Panel
from rich.table import Table

from megatron_tim.training import metric_names as names

Metrics = Mapping[str, float | None]


def number(value: float) -> str:
    """Three digits or so, at most six characters for what is usual: '0.123', '12.3', '1234', '1e-05'."""
    size = abs(value)
    if size != size or size == float("inf"):
        return str(value)
    if size >= 1e5 or 0 < size < 1e-3:
        return f"{value:.0e}"
    return f"{value:.{3 if size < 10 else 1 if size < 100 else 0}f}"


def percent(share: float) -> str:
    """'1.25%', '37.5%', '100%'."""
    points = 100 * share
    return f"{points:.{2 if points < 9.995 else 1 if points < 99.95 else 0}f}%"


def scientific(value: float) -> str:
    """'1.2e-04'; a KL spans many powers of ten."""
    return f"{value:.1e}"


def seconds(value: float) -> str:
    """'0.4', '12.3', '345'."""
    return f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def rate(value: float) -> str:
    """'950', '12.3k'."""
    return f"{value:.0f}" if value < 99_950 else f"{value / 1000:.0f}k"


def duration(value: float) -> str:
    """'45 s', '4 min 05 s', '2 h 03 min'."""
    whole = round(value)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


@dataclass(frozen=True)
class _Column:
    title: str
    metric: str
    width: int
    text: Callable[[float], str]


# One space apart they fill 79 characters, the least that a terminal has.
_COLUMNS = (
    _Column("step", "step", 4, str),
    _Column("reward", names.REWARD, 6, number),
    _Column("KL", names.KL, 8, scientific),
    _Column("ratio", names.MAX_RATIO, 6, number),
    _Column("capped", names.CAPPED_SHARE, 6, percent),
    _Column("grad", names.GRAD_NORM, 5, number),
    _Column("tok/s", names.TOKENS_PER_S, 5, rate),
    _Column("rollout", names.phase_seconds("rollout"), 7, seconds),
    _Column("score", names.phase_seconds("score"), 5, seconds),
    _Column("train", names.phase_seconds("train"), 5, seconds),
    _Column("sync", names.phase_seconds("sync"), 5, seconds),
    _Column("total", names.STEP_SECONDS, 6, seconds),
)

LEGEND = """\
reward: mean of the step's responses; mismatch: KL(rollout || train) by token,
largest ratio train/rollout, tokens whose weight was capped; tok/s: tokens
sampled, over the whole step; seconds: by phase of the step."""


def _header() -> tuple[str, str]:
    titles = " ".join(f"{column.title:>{column.width}}" for column in _COLUMNS)
    before, mismatch, phases = titles.index("KL") - 6, titles.index("capped") + 6, titles.index("rollout")
    groups = " " * before + " mismatch ".center(mismatch - before, "-")
    return groups.ljust(phases) + " seconds ".center(len(titles) - phases, "-"), titles


HEADER = _header()
"""Two lines: groups of columns, and titles."""


def _shown(metrics: Mapping[str, Any], key: str, text: Callable[[float], str]) -> str:
    value = metrics.get(key)
    return "-" if value is None else text(value)


def step_row(metrics: Metrics) -> str:
    """One line with the numbers of a step under :data:`HEADER`."""
    return " ".join(f"{_shown(metrics, column.metric, column.text):>{column.width}}" for column in _COLUMNS)


def evaluation_line(metrics: Metrics) -> str | None:
    """What the evaluation of this step found, or None when there was none."""
    value = metrics.get(names.EXACT_MATCH)
    return None if value is None else f"     held-out exact match (greedy): {percent(value)}"


def preflight_rows(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Labels and values of a preflight, the verdict last.

    Args:
        result: ``tokens``, ``mean_abs_diff``, ``max_abs_diff``, ``kl``, ``routing_disagreement``, ``limit`` and ``passed``
            (of :class:`megatron_tim.training.preflight.Preflight`).
    """
    return [
        ("tokens compared", _shown(result, "tokens", "{:.0f}".format)),
        ("mean |log-prob difference|", _shown(result, "mean_abs_diff", scientific)),
        ("its limit", _shown(result, "limit", scientific)),
        ("largest |log-prob difference|", _shown(result, "max_abs_diff", scientific)),
        ("KL(rollout || train)", _shown(result, "kl", scientific)),
        ("tokens x layers routed differently", _shown(result, "routing_disagreement", percent)),
        ("verdict", {True: "same model", False: "DIFFERENT MODELS", None: "-"}[result.get("passed")]),
    ]


def preflight_table(result: Mapping[str, Any]) -> Table:
    """The trainer's log-probs of the server's own tokens against the server's, before step 1 (keys: :func:`preflight_rows`)."""
    table = Table(box=box.SIMPLE, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    *measured, (label, verdict) = preflight_rows(result)
    for row in measured:
        table.add_row(*row)
    table.add_row(label, verdict, style="bold red" if result.get("passed") is False else "bold green")
    return table


def comparison_rows(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Label, value before and value after of what a run changed.

    Args:
        summary: ``reward_before|after``, ``exact_match_before|after``, ``kl_before|after``, ``max_ratio`` and ``capped_share``
            (of :func:`megatron_tim.diagnostics.run_summary.summarise_run`).
    """
    changed = (
        ("mean reward", "reward", number),
        ("held-out exact match, greedy", "exact_match", percent),
        ("mismatch: KL(rollout || train)", "kl", scientific),
    )
    rows = [(label, _shown(summary, f"{key}_before", text), _shown(summary, f"{key}_after", text)) for label, key, text in changed]
    rows.append(("largest token ratio, whole run", "", _shown(summary, "max_ratio", number)))
    rows.append(("tokens capped, whole run", "", _shown(summary, "capped_share", percent)))
    return rows


def summary_panel(summary: Mapping[str, Any]) -> Panel:
    """How a run went, before and after.

    Args:
        summary: ``name``, ``steps``, ``seconds`` and the keys of :func:`comparison_rows`.
    """
    table = Table(box=None, pad_edge=False)
    table.add_column()
    for title in ("before", "after"):
        table.add_column(title, justify="right")
    for row in comparison_rows(summary):
        table.add_row(*row)
    title = f"{summary.get('name', 'run')}: {_shown(summary, 'steps', str)} steps in {_shown(summary, 'seconds', duration)}"
    return Panel(table, title=title, title_align="left", expand=False)
