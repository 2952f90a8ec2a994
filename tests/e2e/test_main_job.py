"""The main job end to end, with both real engines."""

import json
import re

import psutil
import pyarrow.parquet as pq
import pytest
import yaml
from safetensors import safe_open

from megatron_tim.rollout.records import load_trajectories

pytestmark = pytest.mark.usefixtures("finished_run")


def test_metrics_hold_reward_mismatch_and_both_evaluations(jobs):
    rows = jobs.rows("whole")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert "eval/exact_match" in rows[0] and "eval/exact_match" in rows[4] and "eval/exact_match" not in rows[2]
    for row in rows[1:]:
        assert 0 <= row["reward_mean"] <= 1 and row["skipped_steps"] == 0
        # Where every response of every group is wrong there is nothing to learn.
        assert (row["grad_norm"] > 0) == (row["rollout/unsolved_groups"] + row["rollout/solved_groups"] < 1)
        assert row["rollout_corr/rollout_is_max"] >= 1 and row["rollout_corr/nonfinite_tokens"] == 0
        assert row["rollout_corr/tokens"] == row["rollout/tokens"]
        assert {f"seconds/{phase}" for phase in ("rollout", "score", "train", "sync", "step")} <= row.keys()


def test_a_bfloat16_server_differs_from_the_trainer_and_says_so(jobs, finished_run):
    preflight = jobs.rows("whole")[0]
    assert 0 < preflight["preflight/max_abs_diff"] < 0.5 and preflight["preflight/passed"] == 1
    assert "preflight/routing_disagreement" in preflight
    assert "Preflight" in finished_run.stdout and "same model" in finished_run.stdout


def test_some_step_had_something_to_learn(jobs):
    assert max(row["grad_norm"] for row in jobs.rows("whole")[1:]) > 0


def test_the_run_directory_is_complete(jobs):
    run = jobs.folder / "whole"
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["rollout"]["engine"] == "sglang" and config["parallel"]["expert_parallel_size"] == 2
    assert (run / "report.html").stat().st_size > 10_000 and any((run / "tensorboard").iterdir())
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step_000002", "step_000004"]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 4 and summary["exact_match_before"] is not None and summary["exact_match_after"] is not None
    assert not list(run.rglob("*.tmp")) and not list(run.rglob("*.partial"))


def test_no_secret_is_in_the_run_directory(jobs):
    log = (jobs.folder / "whole" / "sglang.log").read_text()
    assert re.findall(r"'api_key': ('[^']*'|None)", log) == ["'<api key>'"]
    assert "Bearer " not in log


def test_trajectories_say_which_weights_sampled_them(jobs):
    for step in (1, 4):
        path = jobs.folder / "whole" / "rollouts" / f"step_{step:06d}.parquet"
        assert pq.read_table(path).num_rows == 32
        for t in load_trajectories(path):
            assert t.reward in (0.0, 1.0) and t.rollout_logprobs.max() <= 1e-4
            assert t.routed_experts.shape == (t.prompt_ids.size + t.response_ids.size - 1, 4, 2)
            versions = {span.version for span in t.weight_versions}
            assert versions == ({str(step - 1)} if step > 1 else versions) and len(versions) == 1


def test_the_exported_model_has_the_trained_weights(jobs):
    def norm(folder):
        for path in sorted((jobs.folder / folder).glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                if "model.norm.weight" in set(file.keys()):
                    return file.get_tensor("model.norm.weight")

    before, after = norm("whole/hf/warm_start"), norm("whole/hf/final")
    assert before.shape == after.shape and not before.equal(after)


def test_nothing_of_the_job_still_runs(jobs):
    marks = (str(jobs.folder / "whole"), str(jobs.folder / "model"))
    for process in psutil.process_iter(["cmdline"]):
        assert not any(mark in word for word in process.info["cmdline"] or [] for mark in marks)
