"""A run in a few numbers and a few sentences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from megatron_tim.training import metric_names as names
from megatron_tim.training.console_format import duration, number, percent, scientific

LONGEST_WINDOW = 20
GROWTH = 3.0
"""A mean KL that grew by more than this factor between the first and the last steps is called growing,"""
NOTICEABLE_KL = 1e-2
"""unless it is still below this: sampling noise alone moves a smaller one by such factors."""


def window(steps: int) -> int:
    """How many first and last steps stand for 'before' and 'after': a tenth of the run, at least 1, at most 20."""
    return max(1, min(LONGEST_WINDOW, steps // 10))


def summarise_run(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The numbers of a run; None where no row has the metric.

    Args:
        rows: of ``metrics.jsonl``, oldest first; a row of step 0 may hold the evaluation before training.

    Returns:
        ``steps``, ``seconds`` (total of the steps), ``reward_before|after`` and ``kl_before|after`` (means over the first and
        the last :func:`window` steps), ``exact_match_before|after`` (first and last evaluation; a single step or evaluation
        has no after), ``max_ratio`` (largest),
        ``capped_share`` (mean), ``phase_shares`` (of the steps' time, by phase) and ``nonfinite_steps`` (by metric, the steps
        where it was NaN or infinite).
    """
    steps = [row for row in rows if row["step"] > 0]
    evaluations = _values(rows, names.EXACT_MATCH)
    return {
        "steps": steps[-1]["step"] if steps else 0,
        "seconds": sum(_values(steps, names.STEP_SECONDS)) or None,
        **_before_after("reward", steps, names.REWARD),
        **_before_after("kl", steps, names.KL),
        "exact_match_before": evaluations[0] if evaluations else None,
        "exact_match_after": evaluations[-1] if len(evaluations) > 1 else None,
        "max_ratio": max(_values(steps, names.MAX_RATIO), default=None),
        "capped_share": _mean(_values(steps, names.CAPPED_SHARE)),
        "phase_shares": _phase_shares(steps),
        "nonfinite_steps": _nonfinite(rows),
    }


def _values(rows: Iterable[Mapping[str, Any]], metric: str) -> list[float]:
    return [row[metric] for row in rows if row.get(metric) is not None]


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _before_after(label: str, steps: Sequence[Mapping[str, Any]], metric: str) -> dict[str, float | None]:
    length = window(len(steps))
    after = steps[-length:] if len(steps) > 1 else []
    return {f"{label}_before": _mean(_values(steps[:length], metric)), f"{label}_after": _mean(_values(after, metric))}


def _phase_shares(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    total = sum(_values(steps, names.STEP_SECONDS))
    spent = {phase: sum(_values(steps, names.phase_seconds(phase))) for phase in names.PHASES}
    return {phase: seconds / total for phase, seconds in spent.items() if seconds} if total else {}


def _nonfinite(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for row in rows:
        for metric in row.get("nonfinite", []):
            found.setdefault(metric, []).append(row["step"])
    return found


@dataclass(frozen=True)
class Finding:
    """A sentence about the run, and whether it is good news."""

    kind: Literal["good", "neutral", "bad"]
    text: str


def findings(summary: Mapping[str, Any], config: Mapping[str, Any], complete: bool) -> list[Finding]:
    """What a reader should know first, in the order of importance.

    Args:
        summary: of :func:`summarise_run`.
        config: the run's ``config.yaml`` as a tree; a missing key leaves out what needs it.
        complete: whether the run has ended as planned.
    """
    found = [_progress(summary, config, complete), *_broken(summary)]
    for finding in (_held_out(summary, config), _reward(summary), _mismatch(summary), _correction(summary, config), _time(summary)):
        if finding is not None:
            found.append(finding)
    return found


def _progress(summary: Mapping[str, Any], config: Mapping[str, Any], complete: bool) -> Finding:
    steps, planned = summary["steps"], config.get("run", {}).get("steps")
    took = f" in {duration(summary['seconds'])}" if summary["seconds"] else ""
    if complete:
        return Finding("good", f"The run is complete: {_count(steps, 'step')}{took}.")
    done = _count(steps, "step") if planned is None else f"{steps} of {_count(planned, 'step')}"
    return Finding("bad", f"The run is not complete: {done} so far{took}.")


def _broken(summary: Mapping[str, Any]) -> list[Finding]:
    return [
        Finding("bad", f"{metric} was NaN or infinite at {_count(len(steps), 'step')}, first at step {steps[0]}; check what came after.")
        for metric, steps in summary["nonfinite_steps"].items()
    ]


def _held_out(summary: Mapping[str, Any], config: Mapping[str, Any]) -> Finding | None:
    before, after = summary["exact_match_before"], summary["exact_match_after"]
    if before is None:
        return None
    if after is None:
        return Finding("neutral", f"Held-out accuracy was {percent(before)} at its only evaluation; there is nothing to compare it with.")
    text = f"Held-out accuracy (greedy exact match) went from {percent(before)} to {percent(after)}"
    problems = config.get("evaluation", {}).get("problems")
    if problems is None:
        return Finding("neutral", f"{text}.")
    noise = 2 * math.sqrt((before * (1 - before) + after * (1 - after)) / problems)
    size = f"on at most {problems} problems chance alone moves it by about {100 * noise:.1f} points (two standard errors)"
    if abs(after - before) <= noise:
        return Finding("neutral", f"{text}, which may be chance: {size}.")
    return Finding("good" if after > before else "bad", f"{text}, which is more than chance: {size}.")


def _reward(summary: Mapping[str, Any]) -> Finding | None:
    before, after = summary["reward_before"], summary["reward_after"]
    if before is None or after is None:
        return None if before is None else Finding("neutral", f"The mean reward at the start was {number(before)}.")
    if before == after:
        return Finding("neutral", f"The mean reward was {number(before)} at the start and at the end.")
    kind, word = ("good", "rose") if after > before else ("bad", "fell")
    length = window(summary["steps"])
    start, end = f"{number(before)} {_over('first', length)}", f"{number(after)} {_over('last', length)}"
    return Finding(kind, f"The mean reward {word} from {start} to {end}.")


def _mismatch(summary: Mapping[str, Any]) -> Finding | None:
    before, after, ratio = summary["kl_before"], summary["kl_after"], summary["max_ratio"]
    if before is None:
        return None
    if before == 0 and after in (0, None) and ratio == 1:
        return Finding("good", "Server and trainer agreed to the last bit: there was no mismatch.")
    largest = "" if ratio is None else f"; the largest token ratio was {number(ratio)}"
    if after is None:
        return Finding("neutral", f"The mismatch between server and trainer at the start was KL {scientific(before)}{largest}.")
    grew = after > max(NOTICEABLE_KL, GROWTH * before)
    factor = f" more than {GROWTH:.0f}-fold" if before > 0 else ""
    word = f"grew{factor}, as before a collapse" if grew else "did not grow much"
    numbers = f"KL {scientific(before)} at the start and {scientific(after)} at the end{largest}"
    return Finding("bad" if grew else "good", f"The mismatch between server and trainer {word}: {numbers}.")


def _correction(summary: Mapping[str, Any], config: Mapping[str, Any]) -> Finding | None:
    method = config.get("correction", {}).get("method")
    if method is None:
        return None
    if method == "none":
        return Finding("neutral", "No correction was applied: every sampled token counted with weight 1.")
    capped = summary["capped_share"]
    share = "" if capped is None else f"; it capped the weight of {percent(capped)} of the tokens"
    return Finding("neutral", f"Tokens were weighted by the {method.upper()} correction{share}.")


def _time(summary: Mapping[str, Any]) -> Finding | None:
    shares = summary["phase_shares"]
    if not shares:
        return None
    longest = max(shares, key=shares.get)
    return Finding("neutral", f"The {longest} phase took {percent(shares[longest])} of the time of the steps, more than any other.")


def _count(amount: int, noun: str) -> str:
    return f"{amount} {noun}{'' if amount == 1 else 's'}"


def _over(which: str, length: int) -> str:
    return f"in the {which} step" if length == 1 else f"over the {which} {length} steps"
