"""Against a real server: what it records is what transformers computes from the same weights."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from megatron_tim.errors import UserError
from megatron_tim.rollout.client import SGLangClient
from megatron_tim.rollout.server import SGLangServer
from megatron_tim.rollout.trajectory import Trajectory
from tests.helpers import EOS_TOKEN_ID

TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(4, 512, size).tolist() for size in (1, 5, 17, 30, 30, 61)]


def sample(client: SGLangClient, prompts: Sequence[Sequence[int]], samples_per_prompt: int = 1, **changes: object) -> list[Trajectory]:
    arguments = {"temperature": 1.0, "max_new_tokens": 12, "concurrency": 32, "return_routed_experts": True}
    return client.sample(prompts, samples_per_prompt, **(arguments | changes))


@functools.cache
def load(model_path: Path) -> Qwen3MoeForCausalLM:
    return Qwen3MoeForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()


def reference(model_path: Path, trajectory: Trajectory) -> tuple[np.ndarray, np.ndarray]:
    """The response's log-probs [R] at the trajectory's temperature, and the chosen experts [P+R-1, layers, 2], by transformers."""
    ids = torch.tensor([[*trajectory.prompt_ids.tolist(), *trajectory.response_ids.tolist()]])
    with torch.no_grad():
        output = load(model_path)(ids[:, :-1], output_router_logits=True)
    logprobs = (output.logits[0].double() / trajectory.logprob_temperature).log_softmax(-1)
    ours = logprobs.gather(1, ids[0, 1:, None])[trajectory.prompt_ids.size - 1 :, 0]
    routes = torch.stack([layer.topk(2, dim=-1).indices for layer in output.router_logits], dim=1)
    return ours.numpy(), routes.numpy()


def assert_equals_reference(model_path: Path, trajectories: list[Trajectory]) -> None:
    for trajectory in trajectories:
        logprobs, routes = reference(model_path, trajectory)
        np.testing.assert_allclose(trajectory.rollout_logprobs, logprobs, atol=TOLERANCE, rtol=0)
        np.testing.assert_array_equal(np.sort(trajectory.routed_experts, axis=-1), np.sort(routes, axis=-1))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_routes_are_those_of_transformers(
    client: SGLangClient, tiny_model: Path, prompts: list[list[int]], temperature: float
) -> None:
    trajectories = sample(client, prompts, 2, temperature=temperature)
    assert all(trajectory.logprob_temperature == temperature for trajectory in trajectories)
    assert all(trajectory.engine == "sglang 0.5.23 float32" for trajectory in trajectories)
    assert_equals_reference(tiny_model, trajectories)


def test_greedy_takes_the_most_likely_token(client: SGLangClient, tiny_model: Path, prompts: list[list[int]]) -> None:
    trajectories = sample(client, prompts, 2, greedy=True, temperature=0.7)
    assert_equals_reference(tiny_model, trajectories)
    for first, second in zip(trajectories[::2], trajectories[1::2], strict=True):
        assert first.response_ids.tolist() == second.response_ids.tolist() and first.logprob_temperature == 1.0
        ids = torch.tensor([[*first.prompt_ids.tolist(), *first.response_ids.tolist()]])
        with torch.no_grad():
            best = load(tiny_model)(ids[:, :-1]).logits[0].argmax(-1)[first.prompt_ids.size - 1 :]
        assert best.tolist() == first.response_ids.tolist()


def test_groups_are_prompt_major_and_differ(client: SGLangClient, prompts: list[list[int]]) -> None:
    progress: list[tuple[int, int]] = []
    trajectories = sample(client, prompts, 12, prompt_indices=range(100, 106), on_progress=lambda *done: progress.append(done))
    assert [trajectory.group for trajectory in trajectories] == [group for group in range(6) for _ in range(12)]
    assert [trajectory.prompt_index for trajectory in trajectories] == [100 + trajectory.group for trajectory in trajectories]
    assert all(trajectory.prompt_ids.tolist() == prompts[trajectory.group] for trajectory in trajectories)
    assert len({trajectory.rid for trajectory in trajectories}) == 72
    assert len({tuple(trajectory.response_ids.tolist()) for trajectory in trajectories[:12]}) > 1
    assert progress[-1] == (72, 72) and progress == sorted(progress)


def test_the_end_of_sequence_token_ends_a_response_and_is_kept(client: SGLangClient, prompts: list[list[int]]) -> None:
    """At a high temperature each token ends with probability about 1/512: among 128 responses of 60 tokens some do."""
    trajectories = sample(client, prompts[:2], 64, temperature=50.0, max_new_tokens=60)
    stopped = [trajectory for trajectory in trajectories if trajectory.finish_reason == "stop"]
    assert stopped and len(stopped) < len(trajectories)
    for trajectory in trajectories:
        ends = trajectory.response_ids == EOS_TOKEN_ID
        assert ends.sum() == ends[-1] == (trajectory.finish_reason == "stop")
        assert trajectory.finish_reason == "stop" or trajectory.response_ids.size == 60


def test_other_stop_tokens(client: SGLangClient, prompts: list[list[int]]) -> None:
    (free,) = sample(client, prompts[3:4], greedy=True)
    stop = int(free.response_ids[3])
    (stopped,) = sample(client, prompts[3:4], greedy=True, stop_token_ids=[stop])
    assert stopped.finish_reason == "stop"
    assert stopped.response_ids.tolist() == free.response_ids.tolist()[: free.response_ids.tolist().index(stop) + 1]


def test_without_routes(client: SGLangClient, prompts: list[list[int]]) -> None:
    assert all(trajectory.routed_experts is None for trajectory in sample(client, prompts, return_routed_experts=False))


def test_a_weight_update_changes_version_logprobs_and_routes(
    client: SGLangClient, tiny_model: Path, other_tiny_model: Path, prompts: list[list[int]]
) -> None:
    before = client.weight_version()
    try:
        client.update_weights_from_disk(other_tiny_model, 7)
        assert client.weight_version() == "7"
        trajectories = sample(client, prompts)
        assert {span.version for trajectory in trajectories for span in trajectory.weight_versions} == {"7"}
        assert_equals_reference(other_tiny_model, trajectories)
    finally:
        client.update_weights_from_disk(tiny_model, before)
    assert_equals_reference(tiny_model, sample(client, prompts))


def test_a_weight_update_without_whole_weights_is_refused(client: SGLangClient, tiny_model: Path, tmp_path: Path) -> None:
    before = client.weight_version()
    with pytest.raises(UserError, match="holds no .*safetensors"):
        client.update_weights_from_disk(tmp_path, 9)
    for damaged in (b"these are no weights", (tiny_model / "model.safetensors").read_bytes()[:-100]):
        (tmp_path / "model.safetensors").write_bytes(damaged)
        with pytest.raises(UserError, match="model.safetensors is not a whole safetensors file"):
            client.update_weights_from_disk(tmp_path, 9)
    assert client.weight_version() == before


def test_a_prompt_longer_than_the_model_is_refused(client: SGLangClient) -> None:
    with pytest.raises(UserError, match="/generate answered 400: .*1024"):
        sample(client, [[5] * 2000])


def test_the_key_is_required(sglang_server: SGLangServer) -> None:
    with pytest.raises(UserError, match="refuses the API key"):
        SGLangClient(sglang_server.base_url, "wrong", timeout_s=30).weight_version()
    with pytest.raises(UserError, match="refuses the API key"):
        SGLangServer.attach(sglang_server.base_url, "wrong")


def test_attaching_leaves_the_server_running(sglang_server: SGLangServer, client: SGLangClient) -> None:
    with SGLangServer.attach(sglang_server.base_url + "/", sglang_server.api_key) as attached:
        assert attached.base_url == sglang_server.base_url
    client.flush_cache()
    assert client.server_info()["version"] == "0.5.23"
