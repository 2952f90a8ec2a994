"""Problems in GSM8K's form, and the order in which a run trains on them."""

from __future__ import annotations

import json
import reprlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from megatron_tim.errors import UserError
from megatron_tim.evaluation.answers import MARKER, final_answer


@dataclass(frozen=True)
class Problem:
    """A question with a worked answer that ends in '#### 42'."""

    question: str
    answer: str
    final: str
    """The normalised number after '####'."""
    index: int
    """Row in the data file, from 0, blank lines not counted."""
    line: int
    """Line of the data file, from 1."""


def load_problems(path: Path | str) -> list[Problem]:
    """Reads JSON lines with ``question`` and ``answer`` (UTF-8); other fields are ignored.

    Raises:
        UserError: the file cannot be read or holds no problem, or a line is not of GSM8K's form (names line and field).
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; data.train and data.eval must name JSONL files.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as UTF-8 text: {error}.") from None
    problems: list[Problem] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            problems.append(_parse(line, path, number, index=len(problems)))
    if not problems:
        raise UserError(f"{path} holds no problems; write one JSON object a line, with 'question' and 'answer'.")
    return problems


def _parse(line: str, path: Path | str, number: int, index: int) -> Problem:
    where = f"{path}, line {number}"
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not valid JSON ({getattr(error, 'msg', error)}); write one object a line.") from None
    if not isinstance(row, dict):
        raise UserError(f"{where} is a JSON {type(row).__name__}; it must be an object with 'question' and 'answer'.")
    question, answer = _text(row, "question", where), _text(row, "answer", where)
    final = final_answer(answer)
    if final is None:
        problem = "does not hold exactly one number" if MARKER in answer else "is missing"
        raise UserError(f"{where}: field 'answer' must end in the final answer, such as '{MARKER} 42', but '{MARKER}' {problem}.")
    return Problem(question, answer, final, index, number)


def _text(row: dict[str, Any], field: str, where: str) -> str:
    if field not in row:
        raise UserError(f"{where}: field '{field}' is missing; found {', '.join(map(repr, row)) or 'no fields'}.")
    value = row[field]
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{where}: field '{field}' must be text that is not empty, found {reprlib.repr(value)}.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: field '{field}' holds {value[error.start]!r}, half of a character; write the whole one.") from None
    return value


class PromptSampler:
    """Which problems each step trains on: a new seeded order every epoch, each problem once an epoch.

    The problems of a step depend on the seed and the step alone, so a resumed run needs no other state. A step
    that reaches the end of an epoch goes on with the next one, and may do so several times when there are fewer
    problems than ``prompts_per_step``.
    """

    def __init__(self, problems: list[Problem], prompts_per_step: int, seed: int) -> None:
        if not problems or prompts_per_step < 1 or seed < 0:
            raise ValueError("a sampler needs at least one problem, prompts_per_step >= 1 and seed >= 0")
        self._problems, self._prompts_per_step, self._seed = problems, prompts_per_step, seed

    def batch(self, step: int) -> list[Problem]:
        """The ``prompts_per_step`` problems of ``step``, counted from 1."""
        if step < 1:
            raise ValueError(f"steps are counted from 1, got {step}")
        count = len(self._problems)
        first = (step - 1) * self._prompts_per_step
        places = (divmod(position, count) for position in range(first, first + self._prompts_per_step))
        return [self._problems[_epoch_order(count, self._seed, epoch)[place]] for epoch, place in places]


@lru_cache(maxsize=4)
def _epoch_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """Permutation int64 ``[count]`` of one epoch.

    Sorted raw generator bits, because NumPy promises the bit stream across versions but not `Generator.permutation`.
    """
    return np.argsort(np.random.PCG64([seed, epoch]).random_raw(count), kind="stable")
