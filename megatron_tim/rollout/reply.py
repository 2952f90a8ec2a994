"""Turns one of SGLang's replies into a trajectory, or says what is wrong with it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_tim.errors import UserError
from megatron_tim.replay.layout import MoELayout
from megatron_tim.replay.trace import decode_routes
from megatron_tim.rollout.trajectory import Trajectory, WeightVersionSpan

# A log-prob of a near-certain token may come out this far above 0 from rounding, not further.
_LARGEST_LOGPROB = 1e-4


@dataclass(frozen=True)
class Sample:
    """One response to ask for."""

    prompt_index: int
    group: int
    prompt_ids: list[int]
    rid: str


def read_reply(reply: dict[str, Any], sample: Sample, logprob_temperature: float, layout: MoELayout | None, engine: str) -> Trajectory:
    """Checks SGLang's reply to ``sample`` and returns it as a trajectory.

    Args:
        reply: the JSON of one sequence of ``/generate``.
        layout: the model's routers, when routes were asked for.

    Raises:
        UserError: the reply is incomplete or contradicts itself; names the request, the field and the value.
    """
    try:
        meta = reply["meta_info"]
        if meta["id"] != sample.rid:
            raise ValueError("meta_info.id is not the request's")
        reason = meta["finish_reason"]["type"]
        if reason == "abort":
            raise ValueError(f"finish_reason is abort: {meta['finish_reason'].get('message', 'no message')}")
        ids = reply["output_ids"]
        return Trajectory(
            prompt_index=sample.prompt_index,
            group=sample.group,
            prompt_ids=np.array(sample.prompt_ids, dtype=np.int32),
            response_ids=np.array(ids, dtype=np.int32),
            response_mask=np.ones(len(ids), dtype=bool),
            rollout_logprobs=_logprobs(meta["output_token_logprobs"], ids),
            logprob_temperature=logprob_temperature,
            routed_experts=_routes(meta, len(sample.prompt_ids) + len(ids) - 1, layout),
            weight_versions=tuple(WeightVersionSpan(**span) for span in meta["weight_versions"]),
            finish_reason=reason,
            rid=sample.rid,
            engine=engine,
        )
    except KeyError as error:
        raise UserError(f"SGLang's reply to request {sample.rid} has no {error}; check the server's version and arguments.") from None
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(f"SGLang's reply to request {sample.rid} is broken: {error}; see the server's log.") from None


def _logprobs(entries: list[list[Any]], ids: list[int]) -> np.ndarray:
    """Returns float32 [R] of the entries ``[logprob, token id, text]``."""
    if len(entries) != len(ids):
        raise ValueError(f"output_token_logprobs has {len(entries)} entries for {len(ids)} output_ids")
    for position, (entry, token) in enumerate(zip(entries, ids, strict=True)):
        logprob = entry[0]
        if entry[1] != token:
            raise ValueError(f"output_token_logprobs[{position}] is of token {entry[1]}, output_ids has {token}")
        if logprob is None or not math.isfinite(logprob) or logprob > _LARGEST_LOGPROB:
            raise ValueError(f"output_token_logprobs[{position}] is {logprob}, which is no log-probability")
    return np.array([entry[0] for entry in entries], dtype=np.float32)


def _routes(meta: dict[str, Any], rows: int, layout: MoELayout | None) -> np.ndarray | None:
    if layout is None:
        return None
    return decode_routes(meta["routed_experts"], rows, layout, meta.get("routed_experts_dtype", "int32"))
