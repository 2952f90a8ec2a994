"""Problem files are refused by line and field; the data order is a pure function of seed and step."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_tim.errors import UserError
from megatron_tim.training.data import Problem, PromptSampler, load_problems

GOOD = json.dumps({"question": "2 + 2?", "answer": "2 + 2 = 4\n#### 4"})


def problems(count):
    return [Problem(f"question {i}", f"#### {i}", str(i), i, i + 1) for i in range(count)]


def test_load(tmp_path):
    path = tmp_path / "train.jsonl"
    second = json.dumps({"question": "Wie groß\u2028?", "answer": "#### 1,000", "idx": 7}, ensure_ascii=False)
    path.write_bytes(f"\ufeff{GOOD}\r\n\n{second}".encode())
    assert load_problems(path) == [
        Problem("2 + 2?", "2 + 2 = 4\n#### 4", "4", 0, 1),
        Problem("Wie groß\u2028?", "#### 1,000", "1000", 1, 3),
    ]


@pytest.mark.parametrize(
    "line, complaint",
    [
        ("{oops", "line 2 is not valid JSON"),
        ("[" * 100_000, "line 2 is not valid JSON"),
        ("9" * 5000, "line 2 is not valid JSON"),
        ("[1]", "line 2 is a JSON list"),
        ('{"answer": "#### 1"}', "line 2: field 'question' is missing; found 'answer'"),
        ("{}", "field 'question' is missing; found no fields"),
        ('{"question": "?"}', "line 2: field 'answer' is missing"),
        ('{"question": 3, "answer": "#### 1"}', "line 2: field 'question' must be text that is not empty, found 3"),
        ('{"question": " ", "answer": "#### 1"}', "field 'question' must be text"),
        ('{"question": "?", "answer": "4"}', "line 2: field 'answer' must end .* '####' is missing"),
        ('{"question": "?", "answer": "#### four"}', "line 2: field 'answer' must end .* does not hold exactly one number"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, complaint):
    path = tmp_path / "train.jsonl"
    path.write_text(f"{GOOD}\n{line}\n")
    with pytest.raises(UserError, match=complaint) as caught:
        load_problems(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content, complaint", [(b"", "holds no problems"), (b"\n \n", "holds no problems"), (b"\xff\xfe", "cannot be read as UTF-8")]
)
def test_a_bad_file_is_named(tmp_path, content, complaint):
    path = tmp_path / "train.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=complaint):
        load_problems(path)
    with pytest.raises(UserError, match="cannot be read"):
        load_problems(tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        load_problems(tmp_path / "absent.jsonl")


@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 2**40), st.integers(1, 12))
def test_each_epoch_covers_every_problem_once(count, prompts_per_step, seed, steps):
    sampler = PromptSampler(problems(count), prompts_per_step, seed)
    order = [problem.index for step in range(1, steps + 1) for problem in sampler.batch(step)]
    assert len(order) == steps * prompts_per_step
    for start in range(0, len(order), count):
        epoch = Counter(order[start : start + count])
        assert max(epoch.values()) == 1


def test_a_step_needs_no_history():
    in_order = PromptSampler(problems(10), 4, seed=3)
    batches = [in_order.batch(step) for step in range(1, 9)]
    assert PromptSampler(problems(10), 4, seed=3).batch(8) == batches[7]


def test_the_order_depends_on_seed_and_epoch():
    first, second = PromptSampler(problems(50), 50, seed=1), PromptSampler(problems(50), 50, seed=2)
    assert first.batch(1) != first.batch(2) and first.batch(1) != second.batch(1)


def test_the_order_is_the_same_on_every_machine():
    assert [problem.index for problem in PromptSampler(problems(8), 8, seed=1).batch(1)] == [2, 4, 7, 5, 0, 6, 3, 1]


def test_misuse_is_refused():
    with pytest.raises(ValueError, match="at least one problem"):
        PromptSampler([], 4, seed=1)
    with pytest.raises(ValueError, match="counted from 1"):
        PromptSampler(problems(3), 4, seed=1).batch(0)
