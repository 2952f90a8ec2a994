"""The console: aligned rows, plain text where no terminal is, a terminal left in order."""

import io
import os
import pty
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_tim.training import console as console_module
from megatron_tim.training import metric_names as names
from megatron_tim.training.console import RunConsole
from megatron_tim.training.console_format import HEADER, LEGEND, duration, number, percent, rate, step_row

METRICS = {
    "step": 12,
    names.REWARD: 0.4567,
    names.KL: 1.23e-4,
    names.MAX_RATIO: 12.34,
    names.CAPPED_SHARE: 0.0123,
    names.GRAD_NORM: 0.51,
    names.TOKENS_PER_S: 1834.2,
    **{names.phase_seconds(phase): 1.25 for phase in names.PHASES},
    names.STEP_SECONDS: 112.3,
}
SUMMARY = {
    "name": "quickstart",
    "steps": 30,
    "seconds": 245.0,
    "reward_before": 0.1,
    "reward_after": 0.6,
    "exact_match_before": 0.125,
    "exact_match_after": 0.5,
    "kl_before": 1e-4,
    "kl_after": 2e-4,
    "max_ratio": 3.3,
    "capped_share": 0.01,
    "files": {"report": "runs/" + "long-name-" * 12 + "/report.html"},
    "next": ["launch/quickstart.sh correction.method=tis"],
}
PREFLIGHT = {
    "tokens": 1234,
    "mean_abs_diff": 3e-7,
    "max_abs_diff": 1e-5,
    "kl": 1e-9,
    "routing_disagreement": 0.125,
    "limit": 1e-3,
    "passed": True,
}


def printed(use, encoding="utf-8", **options):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    with RunConsole(30, stream=stream, **options) as console:
        use(console)
    stream.flush()
    return stream.buffer.getvalue().decode(encoding)


def everything(console):
    console.progress("starting the server")
    console.preflight(PREFLIGHT)
    for step in range(1, 60):
        console.phase(step, "rollout")
        console.step(METRICS | {"step": step, names.EXACT_MATCH: 0.375 if step == 59 else None})
    console.say("saved")
    console.summary(SUMMARY)


def test_a_row_has_every_number_under_its_title():
    row = step_row(METRICS)
    assert row.split() == ["12", "0.457", "1.2e-04", "12.3", "1.23%", "0.510", "1834", "1.2", "1.2", "1.2", "1.2", "112"]
    assert len(row) == len(HEADER[0]) == len(HEADER[1]) == 79
    assert max(map(len, LEGEND.splitlines())) <= 80


def test_missing_numbers_are_dashes():
    assert step_row({"step": 3, names.REWARD: None}).split() == ["3"] + ["-"] * 11


@given(st.lists(st.just(0.0) | st.floats(1e-9, 99_000), min_size=10, max_size=10), st.floats(0, 1), st.integers(0, 9999))
def test_rows_stay_aligned(values, share, step):
    metrics = dict(zip(METRICS, values, strict=False)) | {"step": step, names.CAPPED_SHARE: share}
    row = step_row(metrics)
    assert len(row) == 79
    ends = [len(HEADER[1]) - len(HEADER[1].split(title, 1)[1]) for title in HEADER[1].split()]
    assert all(row[end - 1] != " " and (end == 79 or row[end] == " ") for end in ends)


def test_numbers_as_text():
    assert [number(value) for value in (0.0, 0.1234, -0.5, 12.34, 1234.5, 1e7, 1e-5, float("nan"))] == [
        *("0.000", "0.123", "-0.500", "12.3", "1234", "1e+07", "1e-05", "nan"),
    ]
    assert [percent(value) for value in (0.0, 0.01234, 0.1234, 0.99999)] == ["0.00%", "1.23%", "12.3%", "100%"]
    assert [rate(value) for value in (12.3, 12345.0, 123456.0)] == ["12", "12345", "123k"]
    assert [duration(value) for value in (0, 59.4, 59.6, 245, 7380)] == ["0 s", "59 s", "1 min 00 s", "4 min 05 s", "2 h 03 min"]


def test_plain_output_has_no_control_codes():
    text = printed(everything)
    assert "\x1b" not in text and "\r" not in text
    assert text.count(HEADER[1]) == 1
    assert "held-out exact match (greedy): 37.5%" in text and text.count("held-out exact match (greedy)") == 1
    assert SUMMARY["files"]["report"] in text
    assert "quickstart: 30 steps in 4 min 05 s" in text and "12.5%" in text and "50.0%" in text


def test_an_ascii_log_can_be_written():
    assert "quickstart: 30 steps" in printed(everything, encoding="ascii")


def test_other_ranks_print_nothing():
    assert printed(everything, quiet=True) == ""


def test_plain_progress_is_sparse(monkeypatch):
    clock = iter([100.0, 100.0, 101.0, 111.0, 111.0])
    monkeypatch.setattr(console_module.time, "monotonic", lambda: next(clock))
    text = printed(lambda console: [console.progress(f"loading {step}") for step in range(3)])
    assert text.splitlines() == ["loading 0", "loading 2"]


@pytest.mark.parametrize("passed, verdict", [(True, "same model"), (False, "DIFFERENT MODELS")])
def test_preflight(passed, verdict):
    text = printed(lambda console: console.preflight(PREFLIGHT | {"passed": passed}))
    assert verdict in text and "3.0e-07" in text and "1.0e-03" in text


def on_a_terminal(monkeypatch, use, **environment):
    """What ``use`` makes a console write to a pseudo-terminal."""
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"TERM": "xterm"} | environment).items():
        monkeypatch.setenv(name, value)
    main, side = pty.openpty()
    chunks = []

    def read():
        while chunk := read_or_end(main):
            chunks.append(chunk)

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(side, "w", encoding="utf-8") as stream, RunConsole(30, stream=stream) as console:
        use(console)
    reader.join()
    os.close(main)
    return b"".join(chunks).decode()


def read_or_end(descriptor):
    try:
        return os.read(descriptor, 65536)
    except OSError:  # Linux reports a pseudo-terminal whose other side is closed as an input/output error.
        return b""


def test_a_terminal_shows_the_phase_and_the_header_again(monkeypatch):
    text = on_a_terminal(monkeypatch, everything)
    assert text.count(HEADER[1]) == 3
    assert "step 7/30  rollout  0 s" in text and "starting the server" in text


def test_a_failure_gives_the_cursor_back(monkeypatch):
    def fail(console):
        with pytest.raises(OSError), console:
            console.progress("work")
            raise OSError("the work failed")

    text = on_a_terminal(monkeypatch, fail)
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_no_color_on_a_terminal_is_plain(monkeypatch):
    assert "\x1b" not in on_a_terminal(monkeypatch, everything, NO_COLOR="1")
