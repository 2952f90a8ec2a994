"""A user's mistakes: one sentence, status 2, nothing left running, nothing half-written."""

import json
import resource
import shutil
import socket

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file


def sentence(done):
    """The one line on stderr; fails when there is more, such as a traceback."""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("megatron-tim: error: "), done.stderr
    return lines[0]


def assert_nothing_runs(folder):
    for process in psutil.process_iter(["cmdline"]):
        assert not any(str(folder) in word for word in process.info["cmdline"] or [])


QUICK = {
    "missing model folder": (["model.hf_path=/nowhere/model"], "model.hf_path = /nowhere/model is not a folder"),
    "missing data": (["data.train=/nowhere/train.jsonl"], "data.train = /nowhere/train.jsonl is not a file"),
    "unknown key": (["rollout.temprature=0.7"], "unknown key 'rollout.temprature'; did you mean 'rollout.temperature'?"),
    "wrong type": (["run.steps=many"], "run.steps = 'many' is refused"),
    "out of range": (["rollout.temperature=0"], "rollout.temperature = 0 is refused"),
    "no override": (["run.steps"], "'run.steps' is not an override"),
    "combination": (["loss.name=ppo", "correction.mode=bypass"], "correction.method = 'cis' has no effect"),
    "world size": (["parallel.expert_parallel_size=4", "--nproc-per-node", "2"], "2 processes do not fit this layout"),
    "experts": (["parallel.expert_parallel_size=3"], "parallel.expert_parallel_size = 3 does not divide the model's 8 experts"),
}


@pytest.mark.parametrize("case", QUICK)
def test_a_mistake_gives_one_sentence(jobs, case):
    overrides, words = QUICK[case]
    assert words in sentence(jobs.run(f"run.name=bad-{case.replace(' ', '-')}", *overrides, status=2))
    assert not (jobs.folder / f"bad-{case.replace(' ', '-')}" / "metrics.jsonl").exists()


def test_a_port_in_use_is_refused_before_the_warm_start(jobs):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = jobs.run("run.name=port", f"rollout.port={port}", "run.steps=1", status=2)
    assert str(port) in sentence(done) and "Warm start:" not in done.stdout
    assert_nothing_runs(jobs.folder / "port")


def test_a_server_that_dies_during_its_start_is_explained(jobs):
    warm = ["warm_start.max_steps=0", "run.steps=1"]
    done = jobs.run("run.name=dies", *warm, 'rollout.extra_args=["--attention-backend","no_such_backend"]', status=2)
    assert "SGLang server stopped" in sentence(done) and "sglang.log" in sentence(done)
    assert_nothing_runs(jobs.folder / "dies")


def test_garbled_weights_are_named(jobs, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(jobs.folder / "model", model)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    done = jobs.run("run.name=garbled", f"model.hf_path={model}", status=2)
    assert "model.safetensors is damaged" in sentence(done)


def edit_weights(jobs, folder, change):
    """A copy of the tests' model whose tensors went through ``change``."""
    model = folder / "model"
    shutil.copytree(jobs.folder / "model", model)
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    return model


def test_weights_that_are_not_finite_are_named(jobs, tmp_path):
    model = edit_weights(jobs, tmp_path, lambda tensors: tensors["model.norm.weight"].fill_(float("nan")))
    done = jobs.run("run.name=nan", f"model.hf_path={model}", status=2)
    assert "model.safetensors: model.norm.weight holds NaN or infinite values" in sentence(done)


def test_weights_of_a_larger_model_are_refused(jobs, tmp_path):
    """More layers in the file than config.json says: not the model that was asked for."""
    model = edit_weights(jobs, tmp_path, lambda tensors: tensors.update({"model.layers.9.mlp.gate.weight": torch.ones(2)}))
    done = jobs.run("run.name=surplus", f"model.hf_path={model}", status=2)
    assert "model.safetensors holds model.layers.9.mlp.gate.weight that the model of its config.json has no place for" in sentence(done)


def test_sequences_longer_than_the_model_are_refused(jobs):
    done = jobs.run("run.name=long", "rollout.max_new_tokens=100000", status=2)
    assert "more than the model's max_position_embeddings" in sentence(done)


def test_a_learning_rate_that_explodes_stops_the_run(jobs, finished_run):
    recorded = ["rollout.engine=recorded", f"rollout.recorded_dir={jobs.folder / 'whole' / 'rollouts'}"]
    warm = [f"model.hf_path={jobs.folder / 'whole' / 'hf' / 'warm_start'}", "warm_start.max_steps=0", "run.steps=4"]
    done = jobs.run("run.name=explodes", *recorded, *warm, "optimizer.lr=1e30", "optimizer.weight_decay=0", status=2)
    assert "NaN or infinite, so the policy has broken; lower optimizer.lr" in sentence(done)


def limit_file_size():
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))


def test_a_full_disk_stops_the_run_and_leaves_whole_files(jobs, finished_run):
    """The first write above 300 kB is the checkpoint of step 2: no half-written folder may stay under its name."""
    recorded = ["rollout.engine=recorded", f"rollout.recorded_dir={jobs.folder / 'whole' / 'rollouts'}"]
    warm = [f"model.hf_path={jobs.folder / 'whole' / 'hf' / 'warm_start'}", "warm_start.max_steps=0", "run.steps=4"]
    done = jobs.run("run.name=full", *recorded, *warm, status=2, preexec_fn=limit_file_size)
    assert "cannot write" in sentence(done) and "step_000002" in sentence(done)
    run = jobs.folder / "full"
    assert not list((run / "checkpoints").iterdir()) and not list(run.rglob("*.tmp"))
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1, 2]
