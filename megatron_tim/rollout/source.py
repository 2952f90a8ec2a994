"""Where a run's trajectories come from: a real SGLang server, or the recorded rollouts of an earlier run."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, Self

import numpy as np

from megatron_tim.config import RolloutConfig
from megatron_tim.correction.validation import POSITIVE_ROUNDING
from megatron_tim.errors import UserError
from megatron_tim.rollout import launch
from megatron_tim.rollout.client import SGLangClient
from megatron_tim.rollout.records import load_trajectories
from megatron_tim.rollout.server import SGLangServer
from megatron_tim.rollout.trajectory import Trajectory

Prompts = Sequence[tuple[int, list[int]]]
"""(row of the data file, token ids) of each prompt."""


class RolloutSource(Protocol):
    """What the training loop needs of an engine. It lives on rank 0; use it as a context manager."""

    samples_live: bool
    """Whether prompts of one's own can be sampled (evaluation, preflight) and new weights are used."""

    def check(self) -> None:
        """Refuses early what would fail only after minutes."""

    def start(self, model_path: Path, version: int, seed: int, say: Callable[[str], None]) -> None:
        """Makes the source ready to sample from the weights in ``model_path``, which are those after step ``version``."""

    def sample(self, step: int, prompts: Prompts) -> list[Trajectory]:
        """The rollout batch of ``step``: ``samples_per_prompt`` responses to each prompt."""

    def greedy(self, prompts: Prompts) -> list[Trajectory]:
        """One greedy response to each prompt."""

    def probe(self, prompts: Prompts) -> list[Trajectory]:
        """One sampled response to each prompt, with the experts of every token: for the preflight."""

    def update_weights(self, model_path: Path, version: int) -> None:
        """Replaces the weights that are sampled from."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...


class SGLangSource:
    """Samples from a server that this run starts, or attaches to when ``rollout.base_url`` is set."""

    samples_live = True

    def __init__(self, config: RolloutConfig, eos_id: int, log_path: Path) -> None:
        self._config, self._eos_id, self._log_path = config, eos_id, log_path
        self._server: SGLangServer | None = None
        self._client: SGLangClient | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._server is not None:
            self._server.stop()

    def check(self) -> None:
        """Refuses a missing key of the server to attach to, or a missing SGLang or a port in use for one of its own."""
        if self._config.base_url is not None:
            _attach_key(self._config)
        else:
            launch.check_version()
            launch.choose_port(self._config.host, self._config.port)

    def start(self, model_path: Path, version: int, seed: int, say: Callable[[str], None]) -> None:
        config = self._config
        if config.base_url is not None:
            self._server = SGLangServer.attach(config.base_url, _attach_key(config))
        else:
            self._server = SGLangServer.start(
                config, model_path, self._log_path, lambda s, stage: say(f"SGLang server: {stage}, {s:.0f} s"), seed
            )
        self._client = SGLangClient(self._server.base_url, self._server.api_key, config.request_timeout_s, self._server.log_path)
        self._client.update_weights_from_disk(model_path, version)

    def sample(self, step: int, prompts: Prompts) -> list[Trajectory]:
        return _checked(self._sample(prompts, self._config.samples_per_prompt, self._config.record_routes), self._config, "the server")

    def greedy(self, prompts: Prompts) -> list[Trajectory]:
        return self._sample(prompts, 1, record_routes=False, greedy=True)

    def probe(self, prompts: Prompts) -> list[Trajectory]:
        return _checked(self._sample(prompts, 1, record_routes=True), self._config, "the server")

    def update_weights(self, model_path: Path, version: int) -> None:
        self._client.update_weights_from_disk(model_path, version)

    def _sample(self, prompts: Prompts, samples_per_prompt: int, record_routes: bool, greedy: bool = False) -> list[Trajectory]:
        return self._client.sample(
            [ids for _, ids in prompts],
            samples_per_prompt,
            temperature=self._config.temperature,
            max_new_tokens=self._config.max_new_tokens,
            concurrency=self._config.concurrency,
            return_routed_experts=record_routes,
            greedy=greedy,
            stop_token_ids=[self._eos_id],
            prompt_indices=[index for index, _ in prompts],
        )


class RecordedSource:
    """Reads each step's trajectories from an earlier run's ``rollouts/`` folder: training without an engine."""

    samples_live = False

    def __init__(self, config: RolloutConfig, vocab_size: int) -> None:
        self._config, self._folder, self._vocab_size = config, config.recorded_dir, vocab_size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None: ...

    def check(self) -> None:
        if not self._folder.is_dir():
            raise UserError(f"rollout.recorded_dir = {self._folder} is not a folder; give the rollouts/ folder of an earlier run.")

    def start(self, model_path: Path, version: int, seed: int, say: Callable[[str], None]) -> None: ...

    def sample(self, step: int, prompts: Prompts) -> list[Trajectory]:
        path = self._folder / f"step_{step:06d}.parquet"
        trajectories = _checked(load_trajectories(path), self._config, str(path))
        asked = {index: np.asarray(ids) for index, ids in prompts}
        for row, t in enumerate(trajectories):
            if t.prompt_index not in asked or not np.array_equal(t.prompt_ids, asked[t.prompt_index]):
                raise UserError(
                    f"{path}: row {row} answers another prompt than step {step} of this run asks; use the same data, seed and"
                    " rollout.prompts_per_step as the recorded run."
                )
            _refuse_damage(t, f"{path}: row {row}", self._vocab_size)
        self._refuse_other_groups(path, trajectories, prompts)
        return trajectories

    def _refuse_other_groups(self, path: Path, trajectories: list[Trajectory], prompts: Prompts) -> None:
        """A group is the ``samples_per_prompt`` answers to one prompt, and there is one for each prompt asked."""
        size = self._config.samples_per_prompt
        advice = "use the recorded run's rollout.prompts_per_step and rollout.samples_per_prompt"
        if len(trajectories) != len(prompts) * size:
            raise UserError(f"{path} holds {len(trajectories)} trajectories, this run asks for {len(prompts) * size}; {advice}.")
        for (group, index), count in Counter((t.group, t.prompt_index) for t in trajectories).items():
            if count != size:
                raise UserError(f"{path}: group {group} holds {count} answers to prompt {index}, this run asks for {size}; {advice}.")
        answered = Counter(t.prompt_index for t in trajectories)
        for index, times in Counter(index for index, _ in prompts).items():
            if answered[index] != times * size:
                raise UserError(f"{path} holds {answered[index]} answers to prompt {index}, this run asks for {times * size}; {advice}.")

    def greedy(self, prompts: Prompts) -> list[Trajectory]:
        raise UserError("rollout.engine = recorded cannot answer new prompts; use sglang for that.")

    probe = greedy

    def update_weights(self, model_path: Path, version: int) -> None: ...


def _attach_key(config: RolloutConfig) -> str:
    key = os.environ.get(config.api_key_env)
    if not key:
        raise UserError(f"rollout.base_url is set, so the environment variable {config.api_key_env} must hold the server's API key.")
    return key


def _refuse_damage(t: Trajectory, where: str, vocab_size: int) -> None:
    """What no engine would have recorded of this model."""
    for name in ("prompt_ids", "response_ids"):
        ids = getattr(t, name)
        if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
            raise UserError(f"{where}: {name} reach from {ids.min()} to {ids.max()}, the model's vocabulary has {vocab_size} entries.")
    logprobs = t.rollout_logprobs[t.response_mask]
    if (logprobs > POSITIVE_ROUNDING).any():
        raise UserError(f"{where}: rollout_logprobs reach {np.nanmax(logprobs):g}, a log-prob is at most 0; the file is damaged.")


def _checked(trajectories: list[Trajectory], config: RolloutConfig, source: str) -> list[Trajectory]:
    """Refuses log-probs of another distribution than the one that was sampled from."""
    for t in trajectories:
        if t.logprob_temperature != config.temperature:
            raise UserError(
                f"{source} has log-probs of temperature {t.logprob_temperature:g} where rollout.temperature ="
                f" {config.temperature:g}, which no correction can use; sample at that temperature, and unset"
                " SGLANG_RETURN_ORIGINAL_LOGPROB for the server (rollout.env)."
            )
    return trajectories
