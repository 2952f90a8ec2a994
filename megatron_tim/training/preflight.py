"""Before step 1: do server and trainer hold the same model? Compared on the server's own tokens.

A difference that rounding explains is measured and reported. One that it does not explain stops the
run, with the cause that the evidence points to: other weights, another arithmetic, a temperature
that was not applied, log-probs of shifted tokens.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_tim.config import PreflightConfig, RolloutConfig
from megatron_tim.errors import UserError
from megatron_tim.megatron.packing import Sample
from megatron_tim.megatron.trainer import MegatronTrainer
from megatron_tim.rollout.trajectory import Trajectory
from megatron_tim.training import metric_names as names
from megatron_tim.training.batch import token_ids

# A float32 server differs from the trainer by the order of its sums; 16-bit ones by their rounding,
# which a router can blow up. Another model differs by nats.
DEFAULT_LIMIT = {"float32": 1e-3, "bfloat16": 0.15, "float16": 0.15}


@dataclass(frozen=True)
class Preflight:
    """The comparison, over the sampled tokens (differences are train - rollout, in nats)."""

    tokens: int
    mean_abs_diff: float
    max_abs_diff: float
    kl: float
    """KL(rollout || train): mean of rollout - train log-prob."""
    routing_disagreement: float
    """Share of (token, layer) pairs sent to another set of experts."""
    limit: float
    passed: bool
    cause: str | None = None


def run_preflight(trainer: MegatronTrainer, trajectories: list[Trajectory], rollout: RolloutConfig, config: PreflightConfig) -> Preflight:
    """Scores the trajectories (which carry routes) with the trainer and compares. Collective."""
    samples = [Sample(token_ids(t), t.prompt_ids.size) for t in trajectories]
    scores = trainer.score(samples, rollout.temperature, record_routes=True)
    recorded = torch.from_numpy(np.concatenate([t.rollout_logprobs for t in trajectories]))
    difference = (scores.logprobs - recorded).double()
    disagreement = np.concatenate([_disagrees(t.routed_experts, mine) for t, mine in zip(trajectories, scores.routes, strict=True)])
    limit = config.max_mean_abs_diff or DEFAULT_LIMIT[rollout.dtype]
    mean = difference.abs().mean().item()
    passed = mean <= limit
    return Preflight(
        tokens=len(difference),
        mean_abs_diff=mean,
        max_abs_diff=difference.abs().max().item(),
        kl=-difference.mean().item(),
        routing_disagreement=float(disagreement.mean()),
        limit=limit,
        passed=passed,
        cause=None if passed else _likely_cause(trainer, samples, trajectories, recorded, rollout, limit),
    )


def refuse_other_model(result: Preflight) -> None:
    """Stops the run unless the preflight passed.

    Raises:
        UserError: the figures, the likely cause and what to do.
    """
    if not result.passed:
        raise UserError(
            f"the server's model is not the trainer's: over {result.tokens} tokens their log-probs differ by {result.mean_abs_diff:.3g}"
            f" on average (limit {result.limit:g}), {result.max_abs_diff:.3g} at most; {result.cause}"
        )


def preflight_metrics(result: Preflight) -> dict[str, float]:
    """The figures for metrics.jsonl."""
    return {names.PREFLIGHT + name: float(value) for name, value in asdict(result).items() if isinstance(value, int | float)}


def _disagrees(rollout: np.ndarray, train: np.ndarray) -> np.ndarray:
    """bool ``[rows, layers]``: another set of experts, in whatever order."""
    return (np.sort(rollout.astype(np.int64), -1) != np.sort(train.astype(np.int64), -1)).any(-1)


def _likely_cause(
    trainer: MegatronTrainer, samples: list[Sample], trajectories: list[Trajectory], recorded: Tensor, rollout: RolloutConfig, limit: float
) -> str:
    """Scores again under each suspicion; the one that brings the difference under the limit is named."""

    def explains(logprobs: Tensor, rows: Tensor | None = None) -> bool:
        difference = (logprobs - recorded).abs()
        return (difference if rows is None else difference[rows]).mean().item() <= limit

    if rollout.temperature != 1.0 and explains(trainer.score(samples, 1.0).logprobs):
        return (
            "the server records log-probs before temperature: unset SGLANG_RETURN_ORIGINAL_LOGPROB for it (rollout.env, or where it was"
            " started)."
        )
    scores = trainer.score(samples, rollout.temperature).logprobs
    bounds = np.cumsum([0] + [t.response_ids.size for t in trajectories])
    for shift, what in ((1, "one token late"), (-1, "one token early")):
        shifted, rows = _shifted(scores, bounds, shift)
        if rows.any() and explains(shifted, rows):
            return f"the recorded log-probs are {what}: they belong to neighbouring tokens; check the SGLang version (megatron-tim doctor)."
    if rollout.dtype == "float16":
        return "float16 loses range where bfloat16 does not: set rollout.dtype to bfloat16 or float32."
    return (
        "most likely the server holds other weights: check that it loaded the folder of model.hf_path, that its safetensors are whole,"
        " and that nothing else updates it."
    )


def _shifted(scores: Tensor, bounds: np.ndarray, shift: int) -> tuple[Tensor, Tensor]:
    """Each response's log-probs moved by ``shift`` tokens, and which entries still have a value."""
    moved, rows = torch.zeros_like(scores), torch.zeros(len(scores), dtype=torch.bool)
    for start, stop in zip(bounds[:-1], bounds[1:], strict=True):
        source = scores[start:stop]
        target = slice(start + max(shift, 0), stop + min(shift, 0))
        moved[target] = source[max(-shift, 0) : len(source) - max(shift, 0)]
        rows[target] = True
    return moved, rows
