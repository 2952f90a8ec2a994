"""One rollout batch turned into optimizer steps: score, correct, step over minibatches and epochs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatron_tim.config import Config
from megatron_tim.correction import CorrectionConfig, MetricSums, denominator_parts, summarise, token_coefficients, token_objective
from megatron_tim.errors import UserError
from megatron_tim.megatron.logprobs import TokenScores
from megatron_tim.megatron.packing import MicroBatch, Sample
from megatron_tim.megatron.trainer import MegatronTrainer, Objective
from megatron_tim.training import metric_names as names
from megatron_tim.training.batch import RolloutBatch, minibatches


@dataclass(frozen=True)
class CorrectedBatch:
    """A rollout batch ready for its optimizer steps.

    Attributes:
        samples: one a trajectory, with all that the policy objective reads.
        denominators: float64 ``[trajectories]``: what each adds to the loss denominator of its optimizer step.
        sums: of the correction's metrics.
    """

    samples: list[Sample]
    denominators: Tensor
    sums: MetricSums


def score_and_correct(trainer: MegatronTrainer, batch: RolloutBatch, config: Config, correction: CorrectionConfig) -> CorrectedBatch:
    """Old log-probs, weights, advantages and the denominators of a rollout batch, under ``correction``.

    Recompute mode evaluates the old policy once, before the first minibatch, and fixes the weights
    for the whole batch. Bypass mode does neither: the weights are formed in each micro-batch.
    """
    fields, keep, sums = {}, batch.mask, MetricSums()
    if correction.mode == "recompute":
        old_logprobs = trainer.score(batch.samples(), config.rollout.temperature).logprobs
        found = batch.correct(old_logprobs, correction, config.rollout.temperature)
        fields, keep, sums = {"old_logprobs": old_logprobs, "weights": found.weights}, found.keep, found.sums
    counted = keep if config.loss.shrink_after_rejection else batch.mask
    fields["advantages"] = batch.advantages(config.advantage, keep)
    fields["coefficients"] = token_coefficients(counted, config.loss, batch.cu_seqlens)
    return CorrectedBatch(batch.samples(**fields), denominator_parts(counted, config.loss, batch.cu_seqlens), sums)


def optimize(trainer: MegatronTrainer, batch: CorrectedBatch, groups: list[int], config: Config, step: int) -> dict[str, float]:
    """All optimizer steps on one rollout batch; returns its metrics, those of the correction included.

    Args:
        groups: the group of each sample; a minibatch holds whole groups.

    Raises:
        UserError: the policy is broken: no step could be applied, or no token had a finite log-prob.
    """
    grad_norms, skipped, sums = [], 0, batch.sums
    for epoch in range(config.train.epochs):
        seed = (config.run.seed, step, epoch)
        for members in minibatches(groups, config.train.minibatches_per_rollout, seed):
            # One denominator for the whole optimizer step, fixed before its first micro-batch.
            denominator = max(1.0, batch.denominators[members].sum().item())
            chosen = [batch.samples[i] for i in members]
            result = trainer.step(chosen, policy_objective(config), denominator, config.rollout.temperature)
            sums += result.sums
            grad_norms.append(result.grad_norm)
            skipped += not result.applied
    metrics = summarise(sums)
    _refuse_broken_policy(metrics, skipped == len(grad_norms), step)
    return metrics | {names.GRAD_NORM: sum(grad_norms) / len(grad_norms), "skipped_steps": skipped}


def _refuse_broken_policy(metrics: dict[str, float], all_skipped: bool, step: int) -> None:
    tokens, lost = metrics["objective/tokens"], metrics["objective/nonfinite_tokens"]
    if all_skipped or tokens and lost == tokens:
        what = "the gradient of every optimizer step was" if all_skipped else "the log-probs of every token were"
        raise UserError(
            f"step {step}: {what} NaN or infinite, so the policy has broken; lower optimizer.lr (or look for NaN in the weights),"
            " and start again from the last good checkpoint of this run, or afresh under another run.name."
        )


def policy_objective(config: Config) -> Objective:
    """The policy loss of a micro-batch as the trainer's objective."""

    def objective(batch: MicroBatch, scores: TokenScores) -> tuple[Tensor, MetricSums]:
        fields = batch.fields
        return token_objective(
            scores.logprobs,
            scores.entropy,
            old_logprobs=fields.get("old_logprobs"),
            rollout_logprobs=fields["rollout_logprobs"],
            advantages=fields["advantages"],
            mask=fields["mask"],
            weights=fields.get("weights"),
            coefficients=fields["coefficients"],
            cu_seqlens=batch.cu_seqlens,
            correction=config.correction,
            loss=config.loss,
        )

    return objective
