"""Writes small arithmetic word problems in GSM8K's form, for runs that a tiny model can learn on a CPU.

example: python tools/make_arithmetic.py --out data/arithmetic --train 4000 --max 20
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import dataclass
from itertools import combinations_with_replacement
from pathlib import Path

from new_folder import new_folder

from megatron_tim.errors import UserError

NAMES = ("Ann", "Ben", "Cara", "Dan", "Eva", "Finn", "Gia", "Hugo")
THINGS = ("apples", "books", "coins", "eggs", "pens", "shells")
HELD_OUT_SHARE = 0.2  # of the operand pairs


@dataclass(frozen=True)
class Operation:
    """One arithmetic operation: its sign and the stories that ask for it."""

    sign: str
    stories: tuple[str, ...]

    def result(self, a: int, b: int) -> int:
        return {"+": a + b, "-": a - b, "*": a * b}[self.sign]


OPERATIONS = {
    "add": Operation(
        "+",
        (
            "{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?",
            "{name} has {a} {things}. {other} has {b} {things}. How many {things} do they have together?",
            "There are {a} {things} in a box and {b} {things} in a bag. How many {things} are there?",
        ),
    ),
    "subtract": Operation(
        "-",
        (
            "{name} has {a} {things} and gives {b} to {other}. How many {things} does {name} have now?",
            "There are {a} {things} in a box. {name} takes {b}. How many {things} are left?",
            "{name} has {a} {things}. {other} has {b} {things}. How many more {things} does {name} have?",
        ),
    ),
    "multiply": Operation("*", ("{name} has {a} boxes with {b} {things} each. How many {things} does {name} have?",)),
}


def split_pairs(largest: int, seed: int) -> dict[str, list[tuple[int, int]]]:
    """Splits the unordered operand pairs 1..``largest`` into disjoint ``train`` and ``eval`` lists.

    Unordered, because 3 + 4 in training would give 4 + 3 away.
    """
    pairs = list(combinations_with_replacement(range(1, largest + 1), 2))
    random.Random(seed).shuffle(pairs)
    held_out = max(1, round(HELD_OUT_SHARE * len(pairs)))
    return {"eval": pairs[:held_out], "train": pairs[held_out:]}


def make_problem(rng: random.Random, pairs: list[tuple[int, int]], operations: list[Operation], steps: bool) -> dict[str, str]:
    """Draws one problem; the larger operand comes first in a subtraction, so no result is negative."""
    operation = rng.choice(operations)
    a, b = rng.choice(pairs)
    if operation.sign == "-" or rng.random() < 0.5:
        a, b = max(a, b), min(a, b)
    name, other = rng.sample(NAMES, 2)
    question = rng.choice(operation.stories).format(name=name, other=other, things=rng.choice(THINGS), a=a, b=b)
    result = operation.result(a, b)
    working = f"{a} {operation.sign} {b} = {result}\n" if steps else ""
    return {"question": question, "answer": f"{working}#### {result}"}


def make_problems(count: int, split: str, seed: int, largest: int, operations: list[str], steps: bool) -> list[dict[str, str]]:
    """Draws ``count`` problems with distinct questions from one split; the same arguments give the same problems.

    Raises:
        UserError: the split does not hold that many distinct problems.
    """
    rng = random.Random(f"{split} {seed}")
    pairs = split_pairs(largest, seed)[split]
    chosen = [OPERATIONS[name] for name in operations]
    problems: dict[str, dict[str, str]] = {}
    for _ in range(100 + 50 * count):
        if len(problems) == count:
            return list(problems.values())
        problem = make_problem(rng, pairs, chosen, steps)
        problems.setdefault(problem["question"], problem)
    raise UserError(f"--max {largest} gives too few distinct problems for --{split} {count}; raise --max or ask for fewer.")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="new folder; gets train.jsonl and eval.jsonl")
    parser.add_argument("--train", type=int, default=4000, help="training problems (default: %(default)s)")
    parser.add_argument("--eval", type=int, default=200, help="held-out problems, of operand pairs never trained on (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="the same seed gives the same files (default: %(default)s)")
    parser.add_argument("--max", type=int, default=20, help="largest operand (default: %(default)s)")
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=["add", "subtract"], help="default: add subtract")
    parser.add_argument("--steps", action=argparse.BooleanOptionalAction, default=False, help="write '3 + 4 = 7' before '#### 7'")
    arguments = parser.parse_args(argv)
    if min(arguments.train, arguments.eval) < 1 or arguments.max < 2:
        raise UserError("--train and --eval must be at least 1 and --max at least 2.")
    return arguments


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    with new_folder(arguments.out) as folder:
        for split in ("train", "eval"):
            problems = make_problems(getattr(arguments, split), split, arguments.seed, arguments.max, arguments.operations, arguments.steps)
            lines = (json.dumps(problem) + "\n" for problem in problems)
            (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    print(f"{arguments.out}: {arguments.train} training and {arguments.eval} held-out problems")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"make_arithmetic: error: {error}")
