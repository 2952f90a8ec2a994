"""Final answers: one number, one spelling, no reward for hedging."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_tim.evaluation.answers import exact_match, final_answer, normalize_number


@pytest.mark.parametrize(
    "text, number",
    [
        ("1,000", "1000"), ("1000.0", "1000"), ("1000.", "1000"), ("$1,000.00", "1000"), ("+7", "7"), ("007", "7"), (".50", "0.5"),
        ("-5", "-5"), ("\u22125", "-5"), ("-$5", "-5"), ("$-5", "-5"), ("-0.0", "0"), ("42 apples.", "42"), ("50%", "50"), ("0", "0"),
        ("109,200,000", "109200000"),
    ],
)  # fmt: skip
def test_one_spelling(text, number):
    assert normalize_number(text) == number


@pytest.mark.parametrize(
    "text", ["", ".", "-", "apples", "x = 42", "42 or 43", "42,43", "1,00", "1/2", "1e3", "1 000", "1.000.000", "\u0664\u0662"]
)
def test_not_exactly_one_number(text):
    assert normalize_number(text) is None


@pytest.mark.parametrize(
    "text, answer",
    [
        ("48 + 24 = <<48+24=72>>72\n#### 72", "72"),
        ("#### 72<|endoftext|>", "72"),
        ("#### 72\nThat was 3 steps.", "72"),
        ("####72\r\n", "72"),
        ("#### 72\n#### 72.0", "72"),
    ],
)
def test_final_answer(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    "text", ["", "72", "####", "####\n72", "### 72", "##### 72", "#### 42\n#### 43", "#### 42 #### 43", "#### 42 or 43", "#### 42\n####"]
)
def test_hedged_or_missing_answers_are_none(text):
    assert final_answer(text) is None
    assert not exact_match(text, "42") and not exact_match(text, "72")


def test_reference_must_be_a_number():
    with pytest.raises(ValueError, match="'forty-two' is not a number"):
        exact_match("#### 42", "forty-two")


@given(st.integers(), st.integers(0, 10**6), st.integers(0, 5))
def test_spellings_of_a_number_are_equal(whole, fraction, zeros):
    plain = f"{whole}.{fraction}"
    grouped = f"${whole:,}.{fraction}{'0' * zeros}"
    assert exact_match(f"so\n#### {grouped} dollars", plain)
    assert normalize_number(normalize_number(plain)) == normalize_number(plain)


@given(st.integers(), st.integers(), st.text())
def test_two_different_answers_never_match(first, second, between):
    text = f"#### {first}\n{between}#### {second}"
    assert exact_match(text, str(first)) <= (first == second)
    assert exact_match(text, str(second)) <= (first == second)


def test_a_degenerate_response_is_read_quickly():
    started = time.perf_counter()
    for character in "$ -,.1#":
        assert final_answer("#### 1 2" + character * 100_000 + " 1 2") is None
        assert final_answer("#### " + character * 100_000 + " 1 2") is None
    assert time.perf_counter() - started < 2


@given(st.text())
def test_any_text_is_read(text):
    answer = final_answer(text)
    assert answer is None or normalize_number(answer) == answer
