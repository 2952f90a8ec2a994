"""A killed run continues from its checkpoint as if nothing had happened, given the same replies."""

import os
import shutil
import signal
import time

import psutil
import pytest

CLOCK = ("seconds/", "tokens_per_s")


def comparable(rows):
    return [{key: value for key, value in row.items() if not key.startswith(CLOCK)} for row in rows]


@pytest.fixture(scope="module")
def recorded(jobs, finished_run):
    """Overrides for a run that replays the finished run's replies from its warm start."""
    whole = jobs.folder / "whole"
    return [
        "rollout.engine=recorded",
        f"rollout.recorded_dir={whole / 'rollouts'}",
        f"model.hf_path={whole / 'hf' / 'warm_start'}",
        "warm_start.max_steps=0",
        "run.steps=4",
    ]


def kill_after_checkpoint(process, checkpoint):
    deadline = time.monotonic() + 300
    while not checkpoint.is_dir():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    family = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    for child in family:
        child.kill()
    process.communicate()
    psutil.wait_procs(family, timeout=20)


def test_metrics_after_a_kill_equal_those_of_an_uninterrupted_run(jobs, recorded):
    jobs.run("run.name=uninterrupted", *recorded)
    process = jobs.start("run.name=killed", *recorded)
    kill_after_checkpoint(process, jobs.folder / "killed" / "checkpoints" / "step_000002")
    done = jobs.run("run.name=killed", *recorded)
    assert "Resumed after step 2 of 4." in done.stdout
    expected = comparable(jobs.rows("uninterrupted"))
    assert [row["step"] for row in expected] == [1, 2, 3, 4]
    assert comparable(jobs.rows("killed")) == expected


def test_recorded_replies_train_as_the_live_run_did(jobs, recorded):
    """The same weights, replies and seeds: the trainer's side of the live run, bit for bit."""
    live, replayed = comparable(jobs.rows("whole"))[1:], comparable(jobs.rows("uninterrupted"))
    for a, b in zip(live, replayed, strict=True):
        a.pop("eval/exact_match", None)
        assert a == b


def test_replies_to_other_prompts_are_refused(jobs, recorded):
    error = jobs.run("run.name=otherseed", *recorded, "run.seed=77", status=2).stderr
    assert "answers another prompt" in error and error.count("\n") == 1


def test_a_finished_run_starts_nothing_and_stays_as_it_is(jobs, recorded):
    before = jobs.rows("uninterrupted")
    done = jobs.run("run.name=uninterrupted", *recorded)
    assert "Every step is done" in done.stdout and jobs.rows("uninterrupted") == before
    assert (jobs.folder / "uninterrupted" / "summary.json").is_file()


def test_a_damaged_checkpoint_is_named(jobs, recorded):
    shutil.copytree(jobs.folder / "uninterrupted", jobs.folder / "damaged")
    for part in (jobs.folder / "damaged" / "checkpoints" / "step_000004").glob("*.distcp"):
        part.write_bytes(part.read_bytes()[:100])
    error = jobs.run("run.name=damaged", *recorded, "run.steps=5", status=2).stderr
    assert error.count("\n") == 1 and "step_000004 cannot be loaded" in error and "delete it" in error


def test_a_resume_with_another_correction_is_told(jobs, recorded):
    done = jobs.run("run.name=killed", *recorded, "run.steps=5", "correction.method=tis", status=2)
    assert "correction.method: cis -> tis" in done.stdout and "step_000005.parquet does not exist" in done.stderr
