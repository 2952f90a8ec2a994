"""Samples from an SGLang server through its raw token interface."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_tim.errors import UserError
from megatron_tim.replay.layout import MoELayout
from megatron_tim.rollout import weight_sync
from megatron_tim.rollout.connection import Connection
from megatron_tim.rollout.reply import Sample, read_reply
from megatron_tim.rollout.trajectory import Trajectory

# Sequences in one HTTP call: large enough that calls cost little, small enough that finished ones come back early.
_SAMPLES_PER_CALL = 64
# Calls wait in the server's queue, so that it can refill its batch without waiting for this process.
_QUEUED_PER_RUNNING = 2

# Every value is sent, since SGLang otherwise takes the model's generation_config (Qwen3: top_p 0.95, top_k 20),
# and the recorded log-probs would be of another distribution than the one that was sampled.
_UNFILTERED = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}


@dataclass(frozen=True)
class _Call:
    """What all samples of one call to :meth:`SGLangClient.sample` share."""

    sampling_params: dict[str, Any]
    logprob_temperature: float
    layout: MoELayout | None
    engine: str


class SGLangClient:
    """Talks to one server; safe to use from several threads.

    Args:
        base_url: e.g. ``http://127.0.0.1:30000``.
        api_key: sent as a bearer token.
        timeout_s: longest wait for one reply, in seconds.
        log_path: the server's log, which errors then name.
    """

    def __init__(self, base_url: str, api_key: str, timeout_s: float, log_path: Path | None = None) -> None:
        self._connection = Connection(base_url, api_key, timeout_s, log_path)
        self._lock = threading.Lock()
        self._info: dict[str, Any] | None = None
        self._records_tempered: bool | None = None

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        samples_per_prompt: int,
        *,
        temperature: float,
        max_new_tokens: int,
        concurrency: int,
        return_routed_experts: bool,
        greedy: bool = False,
        stop_token_ids: Sequence[int] = (),
        prompt_indices: Sequence[int] | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[Trajectory]:
        """Samples ``samples_per_prompt`` responses to each prompt.

        Args:
            prompts: token ids.
            temperature: of sampling; not used when ``greedy``, whose log-probs are at temperature 1.
            max_new_tokens: longest response.
            concurrency: sequences the server runs at once.
            stop_token_ids: end a response, beside the end-of-sequence ids of the model's own configuration.
            prompt_indices: ``Trajectory.prompt_index`` of each prompt; its position when None.
            on_progress: called with the number of samples that have arrived and of all.

        Returns:
            Prompt-major: the samples of the first prompt, then those of the second; ``group`` is the prompt's position.

        Raises:
            UserError: a prompt is empty, the server cannot be reached, takes too long, refuses, or gives a broken reply.
        """
        indices = range(len(prompts)) if prompt_indices is None else prompt_indices
        if empty := [index for prompt, index in zip(prompts, indices, strict=True) if not len(prompt)]:
            raise UserError(f"prompt {empty[0]} has no tokens; a prompt needs at least one.")
        run = uuid.uuid4().hex[:12]
        # All prompts once, then all again: by its second sample a prompt is in the server's prefix cache,
        # whereas copies that arrive together are each computed.
        samples = [
            Sample(index, group, list(prompt), f"{run}-{group}-{number}")
            for number in range(samples_per_prompt)
            for group, (prompt, index) in enumerate(zip(prompts, indices, strict=True))
        ]
        if not samples:
            return []
        params = {"temperature": 0.0 if greedy else temperature, "max_new_tokens": max_new_tokens, **_UNFILTERED}
        call = _Call(
            sampling_params=params | ({"stop_token_ids": list(stop_token_ids)} if stop_token_ids else {}),
            logprob_temperature=1.0 if greedy else self._logprob_temperature(temperature, samples[0].prompt_ids),
            layout=MoELayout.from_hf(self.server_info()["model_path"]) if return_routed_experts else None,
            engine="sglang {version} {dtype}".format(**self.server_info()),
        )
        trajectories = self._run(samples, call, concurrency, on_progress)
        return sorted(trajectories, key=lambda trajectory: trajectory.group)

    def server_info(self) -> dict[str, Any]:
        """Returns the server's version and start arguments."""
        with self._lock:
            if self._info is None:
                self._info = self._connection.get("/server_info")
            return self._info

    def weight_version(self) -> str:
        """Returns the version of the weights that the server samples with now."""
        return self._connection.get("/model_info")["weight_version"]

    def flush_cache(self) -> None:
        """Empties the prefix cache; the server refuses while requests run."""
        self._connection.command("/flush_cache")

    def update_weights_from_disk(self, path: Path | str, version: int | str) -> None:
        """Loads new weights: :func:`megatron_tim.rollout.weight_sync.update_weights_from_disk`."""
        weight_sync.update_weights_from_disk(self._connection, path, version)

    def _run(
        self, samples: list[Sample], call: _Call, concurrency: int, on_progress: Callable[[int, int], None] | None
    ) -> list[Trajectory]:
        size = max(1, min(_SAMPLES_PER_CALL, concurrency, len(samples)))
        chunks = [samples[start : start + size] for start in range(0, len(samples), size)]
        workers = max(1, _QUEUED_PER_RUNNING * concurrency // size)
        pool = ThreadPoolExecutor(workers, thread_name_prefix="rollout")
        try:
            futures = [pool.submit(self._generate, chunk, call) for chunk in chunks]
            arrived = 0
            for future in as_completed(futures):
                arrived += len(future.result())
                if on_progress is not None:
                    on_progress(arrived, len(samples))
            return [trajectory for future in futures for trajectory in future.result()]
        finally:
            # After an error the calls that still run are left to end by themselves, or with their server.
            pool.shutdown(wait=False, cancel_futures=True)

    def _generate(self, samples: list[Sample], call: _Call) -> list[Trajectory]:
        body = {
            "rid": [sample.rid for sample in samples],
            "input_ids": [sample.prompt_ids for sample in samples],
            "sampling_params": call.sampling_params,
            "return_logprob": True,
            "return_routed_experts": call.layout is not None,
        }
        replies = self._connection.post("/generate", body)
        if not isinstance(replies, list) or len(replies) != len(samples):
            found = f"{len(replies)} replies" if isinstance(replies, list) else type(replies).__name__
            raise UserError(f"SGLang answered {found} to a call of {len(samples)} requests; see the server's log.")
        return [
            read_reply(reply, sample, call.logprob_temperature, call.layout, call.engine)
            for reply, sample in zip(replies, samples, strict=True)
        ]

    def _logprob_temperature(self, temperature: float, prompt: list[int]) -> float:
        """Returns the temperature that recorded log-probs refer to: the sampling one, or 1 with SGLANG_RETURN_ORIGINAL_LOGPROB=1.

        The variable is the server's and cannot be asked for, so one token is sampled at temperatures
        1 and 2: the distance between the first and the eighth log-prob is halved, or it is not.
        """
        if temperature == 1.0:
            return 1.0
        if self._records_tempered is None:
            self._records_tempered = self._spread(2.0, prompt) < 0.75 * self._spread(1.0, prompt)
        return temperature if self._records_tempered else 1.0

    def _spread(self, temperature: float, prompt: list[int]) -> float:
        params = {"temperature": temperature, "max_new_tokens": 1, **_UNFILTERED}
        body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True, "top_logprobs_num": 8}
        top = self._connection.post("/generate", body)["meta_info"]["output_top_logprobs"][0]
        return top[0][0] - top[-1][0]
