"""One rollout batch turned into optimizer steps: score, correct, step over minibatches and epochs."""

from __future__ import annotations

from torch import Tensor

from megatron_tim.config import Config
from megatron_tim.correction import MetricSums, summarise, token_objective
from megatron_tim.errors import UserError
from megatron_tim.megatron.logprobs import TokenScores
from megatron_tim.megatron.packing import MicroBatch, Sample
from megatron_tim.megatron.trainer import MegatronTrainer, Objective
from megatron_tim.training import metric_names as names
from megatron_tim.training.batch import RolloutBatch, minibatches


def score_and_correct(trainer: MegatronTrainer, batch: RolloutBatch, config: Config) -> tuple[list[Sample], MetricSums]:
    """The samples to train on, with the weights of the correction, and the sums of its metrics.

    Recompute mode evaluates the old policy once, before the first minibatch, and fixes the weights
    for the whole batch. Bypass mode does neither: the weights are formed in each micro-batch.
    """
    if config.correction.mode == "bypass":
        return batch.samples(), MetricSums()
    old_logprobs = trainer.score(batch.samples(), config.rollout.temperature).logprobs
    correction = batch.correct(old_logprobs, config.correction)
    return batch.samples(old_logprobs=old_logprobs, weights=correction.weights), correction.sums


def optimize(
    trainer: MegatronTrainer, batch: RolloutBatch, samples: list[Sample], sums: MetricSums, config: Config, step: int
) -> dict[str, float]:
    """All optimizer steps on one rollout batch; returns the metrics of the batch, ``sums`` included.

    Raises:
        UserError: the policy is broken: no step could be applied, or no token had a finite log-prob.
    """
    grad_norms, skipped = [], 0
    for epoch in range(config.train.epochs):
        seed = (config.run.seed, step, epoch)
        for members in minibatches(batch.trajectories, config.train.minibatches_per_rollout, seed):
            chosen = [samples[i] for i in members]
            # One denominator for the whole optimizer step, fixed before anything is rejected or dropped.
            denominator = max(1, sum(int(sample.fields["mask"].sum()) for sample in chosen))
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
            correction=config.correction,
            loss=config.loss,
        )

    return objective
