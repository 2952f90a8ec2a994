"""The curves of a run as SVG: small, legible on a phone, told apart without colour vision."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from megatron_tim.diagnostics.run_summary import window
from megatron_tim.training import metric_names as names

Rows = Sequence[Mapping[str, Any]]

# Okabe and Ito's palette: distinct for every kind of colour vision.
BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#7a7a7a"
PHASE_COLOURS = dict(zip(names.PHASES, (BLUE, ORANGE, GREEN, PURPLE), strict=True))
MOST_MARKS = 100

STYLE = {
    "svg.fonttype": "none",
    "font.size": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
}


@dataclass(frozen=True)
class Chart:
    """A curve, its title, and a caption that says how to read it."""

    title: str
    caption: str
    svg: str


def run_charts(rows: Rows, resumed_after: Sequence[int], eval_problems: int | None) -> list[Chart]:
    """The charts of a run, without those for which no row has a number.

    Args:
        rows: of ``metrics.jsonl``, oldest first.
        resumed_after: the steps after which the run was resumed, drawn as dotted lines.
        eval_problems: problems per evaluation, for its error bars; None draws none.
    """
    steps = [row for row in rows if row["step"] > 0]
    charts = (
        _reward(steps, resumed_after),
        _held_out(rows, resumed_after, eval_problems),
        _mismatch(steps, resumed_after),
        _largest_ratio(steps, resumed_after),
        _capped(steps, resumed_after),
        _seconds(steps),
    )
    return [chart for chart in charts if chart is not None]


def _points(rows: Rows, metric: str) -> tuple[list[int], list[float]]:
    """Steps and values; NaN, a gap in the curve, where the value was not finite."""
    found = [(row["step"], row[metric]) for row in rows if metric in row]
    return [step for step, _ in found], [math.nan if value is None else value for _, value in found]


def _has_numbers(values: Sequence[float]) -> bool:
    return any(not math.isnan(value) for value in values)


def _running_mean(values: Sequence[float], length: int) -> list[float]:
    means = []
    for end in range(1, len(values) + 1):
        known = [value for value in values[max(0, end - length) : end] if not math.isnan(value)]
        means.append(fmean(known) if known else math.nan)
    return means


def _curve(title: str, caption: str, rows: Rows, metric: str, resumed_after: Sequence[int], finish: Callable[[Axes], None]) -> Chart | None:
    """One metric over steps: each step's value, and their running mean."""
    steps, values = _points(rows, metric)
    if not _has_numbers(values):
        return None
    length = window(len(steps))

    def draw(axes: Axes) -> None:
        # A marker shows a lone step and a step between two gaps; on a long run markers hide the line.
        style = ".-" if len(steps) <= MOST_MARKS else "-"
        axes.plot(steps, values, style, color=BLUE, alpha=0.4 if length > 1 else 1, linewidth=1, label="each step")
        if length > 1:
            axes.plot(steps, _running_mean(values, length), color=BLUE, label=f"mean of the last {length}")
            axes.legend(loc="best", fontsize=9)
        finish(axes)

    return Chart(title, caption, _svg(title, _in_words(steps, values), draw, resumed_after))


def _scale(axes: Axes, values: Sequence[float]) -> None:
    """A log scale for positive values that span more than a power of ten, else a linear one with a common power of ten."""
    known = [value for value in values if not math.isnan(value)]
    if min(known) > 0 and max(known) > 10 * min(known):
        axes.set_yscale("log")
    else:
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 4), useOffset=False)


def _reward(rows: Rows, resumed_after: Sequence[int]) -> Chart | None:
    caption = "Mean reward of the responses sampled at each step. It should rise."
    return _curve("Reward", caption, rows, names.REWARD, resumed_after, lambda axes: axes.set_ylabel("mean reward"))


def _held_out(rows: Rows, resumed_after: Sequence[int], problems: int | None) -> Chart | None:
    steps, values = _points(rows, names.EXACT_MATCH)
    if not _has_numbers(values):
        return None

    def draw(axes: Axes) -> None:
        errors = [2 * math.sqrt(value * (1 - value) / problems) for value in values] if problems else None
        axes.errorbar(steps, values, yerr=errors, fmt="o-", color=BLUE, capsize=3)
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_ylabel("problems solved")

    bars = " Bars: two standard errors." if problems else ""
    caption = f"Problems that the run never trains on, answered greedily, right when the final answer matches.{bars} It should rise."
    return Chart("Held-out accuracy", caption, _svg("Held-out accuracy", _in_words(steps, values), draw, resumed_after))


def _mismatch(rows: Rows, resumed_after: Sequence[int]) -> Chart | None:
    caption = (
        "How far the probabilities of the server that samples are from those of the trainer that learns, on the sampled tokens."
        " 0 is no mismatch; it should not grow."
    )

    def finish(axes: Axes) -> None:
        _scale(axes, _points(rows, names.KL)[1])
        axes.set_ylabel("KL, nats per token")

    return _curve("Mismatch: KL(rollout || train)", caption, rows, names.KL, resumed_after, finish)


def _largest_ratio(rows: Rows, resumed_after: Sequence[int]) -> Chart | None:
    caption = (
        "The token whose probability differs most upwards: train over rollout. 1 is no mismatch;"
        " such tokens would dominate the gradient if nothing corrected them."
    )

    def finish(axes: Axes) -> None:
        _scale(axes, _points(rows, names.MAX_RATIO)[1])
        axes.axhline(1, color=GREY, linewidth=1)
        axes.set_ylabel("largest ratio")

    return _curve("Mismatch: largest token ratio", caption, rows, names.MAX_RATIO, resumed_after, finish)


def _capped(rows: Rows, resumed_after: Sequence[int]) -> Chart | None:
    caption = "Sampled tokens whose weight the correction capped. Few is normal; a rising share means that the mismatch grows."

    def finish(axes: Axes) -> None:
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_ylabel("share of tokens")

    return _curve("Tokens capped by the correction", caption, rows, names.CAPPED_SHARE, resumed_after, finish)


def _seconds(rows: Rows) -> Chart | None:
    """Stacked bars of the phases' seconds; long runs are averaged into at most :data:`MOST_MARKS` bars."""
    rows = [row for row in rows if any(row.get(names.phase_seconds(phase)) for phase in names.PHASES)]
    if not rows:
        return None
    length = math.ceil(len(rows) / MOST_MARKS)
    bins = [rows[start : start + length] for start in range(0, len(rows), length)]
    middles = [fmean(row["step"] for row in part) for part in bins]

    def draw(axes: Axes) -> None:
        floor = [0.0] * len(bins)
        for phase, colour in PHASE_COLOURS.items():
            heights = [fmean(row.get(names.phase_seconds(phase)) or 0.0 for row in part) for part in bins]
            axes.bar(middles, heights, width=length, bottom=floor, color=colour, label=phase)
            floor = [below + height for below, height in zip(floor, heights, strict=True)]
        axes.set_ylim(0, 1.25 * max(floor))
        axes.set_ylabel("seconds per step")
        axes.legend(loc="upper center", ncols=len(names.PHASES), fontsize=9, columnspacing=1, handlelength=1)

    caption = (
        "rollout: the server samples. score: the trainer evaluates the sampled tokens before it learns."
        " train: gradients and optimizer. sync: new weights to the server."
    )
    return Chart("Time by phase", caption, _svg("Time by phase", "Stacked bars of the seconds of each phase.", draw, ()))


def _in_words(steps: Sequence[int], values: Sequence[float]) -> str:
    known = [(step, value) for step, value in zip(steps, values, strict=True) if not math.isnan(value)]
    (first, start), (last, end) = known[0], known[-1]
    low, high = min(value for _, value in known), max(value for _, value in known)
    return f"{start:.3g} at step {first}, {end:.3g} at step {last}; lowest {low:.3g}, highest {high:.3g}."


def _svg(title: str, description: str, draw: Callable[[Axes], None], resumed_after: Sequence[int]) -> str:
    """Draws one pair of axes and returns an SVG element that scales with the page and that a screen reader can read."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.2, 2.9), layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        for step in resumed_after:
            axes.axvline(step + 0.5, color=GREY, linewidth=1, linestyle=":")
        low, high = axes.get_xlim()
        middle, half = (low + high) / 2, max((high - low) / 2, 0.75)  # A lone step does not need fractions of a step on its axis.
        axes.set_xlim(middle - half, middle + half)
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return _inline(buffer.getvalue(), title, description)


def _inline(document: str, title: str, description: str) -> str:
    """Cuts the SVG element out of a document and makes its ids unique within a page of several."""
    prefix = re.sub(r"[^a-z]+", "-", title.lower()).strip("-")
    body = re.sub(r"<metadata>.*?</metadata>", "", document[document.index("<svg") :], flags=re.DOTALL)
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", body)
    size = re.search(r'viewBox="[^"]*"', body).group()
    head = f'<svg xmlns:xlink="http://www.w3.org/1999/xlink" xmlns="http://www.w3.org/2000/svg" {size} role="img"'
    label = f'aria-labelledby="{prefix}-title {prefix}-description"'
    words = f'<title id="{prefix}-title">{escape(title)}</title><desc id="{prefix}-description">{escape(description)}</desc>'
    return f"{head} {label}>{words}{body[body.index('>') + 1 :]}"
