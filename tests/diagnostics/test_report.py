"""The report is one self-contained page that says how a run went, whatever the run left behind."""

import math
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_tim.diagnostics.report import write_report
from megatron_tim.diagnostics.run_summary import findings, summarise_run, window
from megatron_tim.errors import UserError
from megatron_tim.training import metric_names as names
from megatron_tim.training.run_directory import RunDirectory

CONFIG = """
run: {name: demo, steps: 10}
model: {hf_path: models/tiny-qwen3-moe}
correction: {method: cis, lam: 2.3}
evaluation: {problems: 200}
rollout: {env: {HF_TOKEN: top-secret-token}, api_key_env: MEGATRON_TIM_API_KEY}
"""


PREFLIGHT = {
    "tokens": 812.0,
    "mean_abs_diff": 3.1e-3,
    "max_abs_diff": 0.04,
    "kl": 1e-4,
    "routing_disagreement": 0.12,
    "limit": 0.15,
    "passed": 1.0,
}


class Page(HTMLParser):
    """Collects what a test asks about a page, and that its elements nest."""

    VOID = {"meta", "link", "br"}

    def __init__(self, html):
        super().__init__()
        self.open, self.ids, self.references, self.tags, self.text = [], [], [], [], []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            if name in ("href", "src", "xlink:href"):
                self.references.append(value)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def row(step, **metrics):
    return {
        names.REWARD: 0.1 * step,
        names.KL: 1e-4,
        names.MAX_RATIO: 2.5,
        names.CAPPED_SHARE: 0.01,
        **{names.phase_seconds(phase): 1.0 for phase in names.PHASES},
        names.STEP_SECONDS: 5.0,
    } | metrics


def make_run(path, steps=10, complete=True, config=CONFIG, extra=None):
    with RunDirectory(path, tensorboard=False) as run:
        run.record("start", steps=steps)
        run.log_metrics(0, {names.EXACT_MATCH: 0.125, **{names.PREFLIGHT + name: value for name, value in PREFLIGHT.items()}})
        for step in range(1, steps + 1):
            run.log_metrics(step, row(step) | (extra or {}).get(step, {}) | ({names.EXACT_MATCH: 0.5} if step == steps else {}))
        run.record("resume", step=5)
        if complete:
            run.write_summary({"seconds": 61.0})
        run.config_path.write_text(config)
    return path


def read_report(path):
    return write_report(path).read_text(encoding="utf-8")


def test_a_complete_run(tmp_path):
    html = read_report(make_run(tmp_path / "demo", steps=20))
    text = " ".join(Page(html).text)
    assert "The run is complete: 20 steps in 1 min 01 s." in text
    assert "went from 12.5% to 50.0%, which is more than chance" in text
    assert "rose from 0.150 over the first 2 steps to 1.950 over the last 2 steps" in text
    assert "did not grow much: KL 1.0e-04 at the start and 1.0e-04 at the end; the largest token ratio was 2.500" in text
    assert "CIS correction; it capped the weight of 1.00% of the tokens" in text
    for title in ("Reward", "Held-out accuracy", "Mismatch: largest token ratio", "Tokens capped by the correction", "Time by phase"):
        assert title in text
    assert "812" in text and "3.1e-03" in text and "12.0%" in text and "same model" in text
    assert "resumed after step 5" in text
    assert "models/tiny-qwen3-moe" in text and "lam" in text


def test_the_page_needs_nothing_else(tmp_path):
    html = read_report(make_run(tmp_path / "demo"))
    page = Page(html)
    assert page.open == [] and "script" not in page.tags and "img" not in page.tags
    assert len(page.ids) == len(set(page.ids))
    assert all(reference.startswith(("#", "data:")) for reference in page.references)
    assert {reference[1:] for reference in page.references if reference.startswith("#")} <= set(page.ids)
    assert "@import" not in html and "url(http" not in html
    assert page.tags.count("svg") == 6 and page.tags.count("desc") == 6
    assert 'name="viewport"' in html


def test_values_of_the_environment_are_not_shown(tmp_path):
    html = read_report(make_run(tmp_path / "demo"))
    assert "HF_TOKEN" in html and "top-secret-token" not in html


def test_text_is_escaped(tmp_path):
    config = CONFIG.replace("models/tiny-qwen3-moe", "'<script>alert(1)</script>'")
    assert "<script>" not in read_report(make_run(tmp_path / "demo", config=config))


def test_an_unfinished_run_says_so(tmp_path):
    text = read_report(make_run(tmp_path / "demo", steps=4, complete=False))
    assert "The run is not complete: 4 of 10 steps so far in 20 s." in text


def test_only_metrics_are_needed(tmp_path):
    with RunDirectory(tmp_path / "bare", tensorboard=False) as run:
        run.log_metrics(1, {names.REWARD: 0.5})
    text = read_report(tmp_path / "bare")
    assert "The mean reward at the start was 0.500" in text and "made no preflight" in text and "Configuration" not in text


def test_broken_numbers_are_named(tmp_path):
    run = make_run(tmp_path / "demo", extra={3: {names.KL: math.nan}, 7: {names.KL: math.inf, names.GRAD_NORM: math.nan}})
    text = read_report(run)
    assert f"{names.KL} was NaN or infinite at 2 steps, first at step 3" in text
    assert f"{names.GRAD_NORM} was NaN or infinite at 1 step, first at step 7" in text


def test_a_run_of_nothing_but_broken_numbers(tmp_path):
    nothing = dict.fromkeys(row(1), math.nan)
    page = Page(read_report(make_run(tmp_path / "demo", steps=3, extra=dict.fromkeys((1, 2, 3), nothing))))
    assert page.tags.count("svg") == 1


@pytest.mark.parametrize(
    "name, content, complaint",
    [
        ("metrics.jsonl", "", "holds no steps to report"),
        ("metrics.jsonl", "{}\n", "metrics.jsonl, line 1 is damaged"),
        ("config.yaml", "a: [", "config.yaml cannot be read"),
        ("config.yaml", "- a", "config.yaml is damaged"),
        ("summary.json", "{", "summary.json cannot be read"),
        ("history.jsonl", "3\n", "history.jsonl, line 1 is damaged"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, name, content, complaint):
    run = make_run(tmp_path / "demo", steps=1)
    (run / name).write_text(content)
    with pytest.raises(UserError, match=complaint):
        write_report(run)


def test_not_a_run(tmp_path):
    with pytest.raises(UserError, match="holds no steps to report"):
        write_report(tmp_path / "absent")


def test_a_report_is_replaced_whole(tmp_path):
    run = make_run(tmp_path / "demo")
    assert read_report(run) and read_report(run)
    assert not list(run.glob("*.tmp"))


def verdict(rows, config=None, complete=True):
    return {finding.text: finding.kind for finding in findings(summarise_run(rows), config or {}, complete)}


def steps_with(metric, values):
    return [{"step": step, metric: value} for step, value in enumerate(values, start=1)]


@pytest.mark.parametrize(
    "values, kind, words",
    [
        ([1e-2] * 5 + [4e-2] * 5, "bad", "grew more than 3-fold"),
        ([-1e-5] * 5 + [4e-2] * 5, "bad", "grew, as before"),
        ([1e-4] * 5 + [4e-4] * 5, "good", "did not grow much"),
        ([1e-4] * 5 + [2e-4] * 5, "good", "did not grow much"),
        ([-1e-6] * 10, "good", "did not grow much"),
        ([1e-4], "neutral", "at the start was KL 1.0e-04"),
    ],
)
def test_the_verdict_on_the_mismatch(values, kind, words):
    found = [(text, which) for text, which in verdict(steps_with(names.KL, values)).items() if "mismatch" in text]
    assert len(found) == 1 and found[0][1] == kind and words in found[0][0]


def test_an_exact_run_is_called_exact():
    rows = [{"step": step, names.KL: 0.0, names.MAX_RATIO: 1.0} for step in range(1, 4)]
    assert verdict(rows)["Server and trainer agreed to the last bit: there was no mismatch."] == "good"


@pytest.mark.parametrize(
    "before, after, problems, kind",
    [
        (0.1, 0.5, 200, "good"),
        (0.5, 0.1, 200, "bad"),
        (0.5, 0.55, 100, "neutral"),
        (0.5, 0.55, 100_000, "good"),
        (0.1, 0.5, None, "neutral"),
    ],
)
def test_the_verdict_on_accuracy_knows_chance(before, after, problems, kind):
    config = {"evaluation": {"problems": problems}} if problems else {}
    texts = verdict(steps_with(names.EXACT_MATCH, [before, after]), config)
    assert [which for text, which in texts.items() if text.startswith("Held-out")] == [kind]


def test_a_single_evaluation_is_compared_with_nothing():
    assert any("only evaluation" in text for text in verdict(steps_with(names.EXACT_MATCH, [0.5])))


def test_without_a_correction_the_report_says_so():
    assert "No correction was applied" in " ".join(verdict(steps_with(names.KL, [0.1]), {"correction": {"method": "none"}}))


@given(st.integers(0, 10_000))
def test_the_window_fits_the_run(steps):
    assert 1 <= window(steps) <= 20 and 2 * window(steps) <= max(2, steps)


VALUES = st.none() | st.floats(-10, 10) | st.floats(0, 1e9)
ROWS = st.lists(st.dictionaries(st.sampled_from([*row(1)]), VALUES), min_size=1, max_size=5)


@settings(max_examples=15, deadline=None)
@given(
    rows=st.lists(st.dictionaries(st.sampled_from([*row(1)]), VALUES), min_size=1, max_size=5), scores=st.lists(st.floats(0, 1), max_size=3)
)
def test_any_numbers_make_a_page(tmp_path_factory, rows, scores):
    path = tmp_path_factory.mktemp("run")
    with RunDirectory(path, tensorboard=False) as run:
        for step, metrics in enumerate(rows, start=1):
            given_metrics = {name: math.nan if value is None else value for name, value in metrics.items()}
            run.log_metrics(step, given_metrics | ({names.EXACT_MATCH: scores[step - 1]} if step <= len(scores) else {}))
    assert Page(read_report(path)).open == []
