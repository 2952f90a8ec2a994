"""The arithmetic problems: right answers, a held-out split, careless answers in the share asked for, the same files for the same seed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import make_arithmetic
import pytest

from megatron_tim.errors import UserError


def make(folder: Path, *arguments: str) -> Path:
    make_arithmetic.main(["--out", str(folder), *arguments])
    return folder


def rows(folder: Path, split: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]


def true_result(question: str) -> int:
    first, second = (int(number) for number in re.findall(r"\d+", question))
    return first - second if re.search("loses|sells", question) else first + second


def answer(row: dict[str, str]) -> int:
    return int(re.fullmatch(r"#### (\d+)", row["answer"])[1])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("arithmetic") / "data", "--train", "2000", "--eval", "300")


def test_counts_and_right_answers(data: Path) -> None:
    for split, count in (("train", 2000), ("eval", 300)):
        found = rows(data, split)
        assert len(found) == count
        assert all(answer(row) == true_result(row["question"]) >= 0 for row in found)


def test_questions_are_distinct_and_those_of_eval_are_never_trained_on(data: Path) -> None:
    questions = [row["question"] for split in ("train", "eval") for row in rows(data, split)]
    assert len(set(questions)) == len(questions)


def test_careless_answers_are_right_in_the_share_asked_for_and_otherwise_a_little_too_many(data: Path) -> None:
    warm_start = rows(data, "warm_start")
    assert [row["question"] for row in warm_start] == [row["question"] for row in rows(data, "train")]
    errors = [answer(row) - true_result(row["question"]) for row in warm_start]
    assert set(errors) == {0, 1, 2}
    assert 0.20 < errors.count(0) / len(errors) < 0.28


def test_the_seed_decides(data: Path, tmp_path: Path) -> None:
    again = make(tmp_path / "again", "--train", "2000", "--eval", "300")
    other = make(tmp_path / "other", "--train", "2000", "--eval", "300", "--seed", "2")
    for split in ("train", "eval", "warm_start"):
        assert (again / f"{split}.jsonl").read_bytes() == (data / f"{split}.jsonl").read_bytes()
        assert (other / f"{split}.jsonl").read_bytes() != (data / f"{split}.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max", "2", "--train", "100000"], ["--train 100000", "--max 2"]),
        (["--train", "0"], ["--train"]),
        (["--max", "0"], ["--max"]),
        (["--share-right", "1.5"], ["--share-right 1.5"]),
    ],
)
def test_the_impossible_is_refused_by_name_and_leaves_nothing(tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    with pytest.raises(UserError) as refusal:
        make(tmp_path / "data", *arguments)
    assert all(word in str(refusal.value) for word in words)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_refused_in_a_sentence(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, make_arithmetic.__file__, "--out", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == f"make_arithmetic: error: {tmp_path} exists already; remove it or choose another --out.\n"
