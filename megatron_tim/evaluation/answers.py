"""Final answers of GSM8K's form, '#### 42': reading them, and deciding whether a response has the right one."""

from __future__ import annotations

import re

MARKER = "####"
"""What stands before the final answer."""

# Thousands are grouped by commas or not at all, so that '42,43' is two numbers and not 4243.
_NUMBER = re.compile(r"\$? ?(?P<sign>[-+\u2212]?) ?\$? ?(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+|[0-9]*)(?:\.(?P<fraction>[0-9]*))?[^0-9]*")


def normalize_number(text: str) -> str | None:
    """The one spelling of the number that ``text`` starts with, or None when it does not hold exactly one.

    Commas between thousands, a leading ``$``, a plus sign, leading zeros and a fraction's trailing zeros
    are dropped, so '1,000', '$1000' and '1000.0' all give '1000'. Words may follow ('42 apples'), another
    digit may not ('42 or 43'). Digits are compared as text: no number is too long and none is rounded.
    """
    match = _NUMBER.fullmatch(text.strip())
    if match is None or not (match["whole"] or match["fraction"]):
        return None
    whole = match["whole"].replace(",", "").lstrip("0") or "0"
    fraction = (match["fraction"] or "").rstrip("0")
    number = f"{whole}.{fraction}" if fraction else whole
    return f"-{number}" if match["sign"] in ("-", "\u2212") and number != "0" else number


def final_answer(text: str) -> str | None:
    """The normalised number after '####' on the same line, or None when ``text`` does not commit to one.

    GSM8K's own reader takes the first '####' and ignores what follows. As a reward that pays for hedging:
    a response may list guesses behind several markers or on one line. Here every marker must hold a number,
    and all of them the same one; on what a solution by GSM8K's form contains, one marker, both readers agree.
    """
    _, *answers = text.split(MARKER)
    numbers = {normalize_number(answer.partition("\n")[0]) for answer in answers}
    return numbers.pop() if len(numbers) == 1 else None


def exact_match(response_text: str, reference: str) -> bool:
    """Whether the response's final answer is the number ``reference`` ('1,000' and '1000.0' are the same).

    Raises:
        ValueError: ``reference`` is not a number, so that no response could be right.
    """
    expected = normalize_number(reference)
    if expected is None:
        raise ValueError(f"reference {reference!r} is not a number such as '42' or '1,000.5'")
    return final_answer(response_text) == expected
