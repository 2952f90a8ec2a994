"""Writes small arithmetic word problems in GSM8K's form, for runs that a tiny model can learn on a CPU.

    python tools/make_arithmetic.py --out data/arithmetic

The new folder gets three files of distinct questions: train.jsonl and eval.jsonl with right answers, and
warm_start.jsonl, the training questions as careless students answered them: most count one or two too many.
A model that imitates those is right about one time in four, and knows enough for RL to teach it the rest.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from itertools import product
from pathlib import Path

from new_folder import new_folder

from megatron_tim.errors import UserError

NAMES = ("Ann", "Ben", "Cara", "Dan", "Eva", "Finn", "Gia", "Hugo")
THINGS = ("apples", "books", "coins", "eggs", "pens", "shells")
SIGN_OF_VERB = {"gets": 1, "finds": 1, "loses": -1, "sells": -1}
STORY = "{name} has {a} {things} and {verb} {b}. How many now?"
MISTAKES = (1, 2)  # a careless student counts one or two too many


def all_problems(largest: int) -> list[tuple[str, int]]:
    """Every (question, result) with operands 1..``largest`` and no negative result."""
    numbers = range(1, largest + 1)
    return [
        (STORY.format(name=name, a=a, things=things, verb=verb, b=b), a + sign * b)
        for name, things, (verb, sign), a, b in product(NAMES, THINGS, SIGN_OF_VERB.items(), numbers, numbers)
        if a + sign * b >= 0
    ]


def row(question: str, result: int) -> dict[str, str]:
    """A problem in GSM8K's form."""
    return {"question": question, "answer": f"#### {result}"}


def careless(problems: list[tuple[str, int]], rng: random.Random, share_right: float) -> list[dict[str, str]]:
    """The problems with answers of which ``share_right`` are right."""
    return [row(q, result if rng.random() < share_right else result + rng.choice(MISTAKES)) for q, result in problems]


def make_splits(arguments: argparse.Namespace) -> dict[str, list[dict[str, str]]]:
    """The rows of each file; the same arguments give the same rows.

    Raises:
        UserError: there are fewer distinct questions than asked for.
    """
    rng = random.Random(arguments.seed)
    problems = all_problems(arguments.max)
    if arguments.train + arguments.eval > len(problems):
        raise UserError(
            f"--train {arguments.train} and --eval {arguments.eval} ask for more than the {len(problems)} distinct questions that"
            f" --max {arguments.max} gives; raise --max or ask for fewer."
        )
    rng.shuffle(problems)
    held_out, training = problems[: arguments.eval], problems[arguments.eval : arguments.eval + arguments.train]
    return {
        "train": [row(*problem) for problem in training],
        "eval": [row(*problem) for problem in held_out],
        "warm_start": careless(training, rng, arguments.share_right),
    }


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="new folder; gets train.jsonl, eval.jsonl and warm_start.jsonl")
    parser.add_argument("--train", type=int, default=4000, help="training questions (default: %(default)s)")
    parser.add_argument("--eval", type=int, default=400, help="held-out questions, never trained on (default: %(default)s)")
    parser.add_argument("--max", type=int, default=9, help="largest operand (default: %(default)s)")
    parser.add_argument("--share-right", type=float, default=0.24, help="right answers among warm_start.jsonl's (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="the same seed gives the same files (default: %(default)s)")
    arguments = parser.parse_args(argv)
    if min(arguments.train, arguments.eval, arguments.max) < 1:
        raise UserError("--train, --eval and --max must be at least 1.")
    if not 0 <= arguments.share_right <= 1:
        raise UserError(f"--share-right {arguments.share_right} is not a share; give a number from 0 to 1.")
    return arguments


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    splits = make_splits(arguments)
    with new_folder(arguments.out) as folder:
        for name, rows in splits.items():
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    print(f"{arguments.out}: {arguments.train} training and {arguments.eval} held-out problems")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"make_arithmetic: error: {error}")
