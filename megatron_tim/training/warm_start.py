"""Supervised steps through the training path, until the model solves a minority of the held-out problems."""

from __future__ import annotations

import torch

from megatron_tim.config import OptimizerConfig, WarmStartConfig
from megatron_tim.errors import UserError
from megatron_tim.megatron.logprobs import TokenScores
from megatron_tim.megatron.packing import MicroBatch, Sample
from megatron_tim.megatron.trainer import MegatronTrainer
from megatron_tim.training.console import RunConsole
from megatron_tim.training.data import Problem, PromptSampler
from megatron_tim.training.task import Task
from megatron_tim.training.text import TextCodec


def warm_start(
    trainer: MegatronTrainer, task: Task, config: WarmStartConfig, optimizer: OptimizerConfig, seed: int, console: RunConsole
) -> float:
    """Steps on worked answers until ``config.target_accuracy`` of the held-out problems is solved greedily.

    Returns:
        The share solved at the end.

    Raises:
        UserError: ``config.max_steps`` did not suffice.
    """
    trainer.new_optimizer(optimizer, lr=config.lr)
    sampler = PromptSampler(task.training, config.batch_size, seed)
    held_out = [worked_sample(problem, task.codec) for problem in task.held_out[: config.problems]]
    solved, step = share_solved(trainer, held_out), 0
    while solved < config.target_accuracy and step < config.max_steps:
        step += 1
        samples = [worked_sample(problem, task.codec) for problem in sampler.batch(step)]
        tokens = sum(sample.response_length for sample in samples)
        loss = sum(trainer.step(samples, negative_log_likelihood, tokens).results) / tokens
        if step % config.check_every == 0:
            solved = share_solved(trainer, held_out)
            console.progress(f"warm start: step {step}, loss {loss:.3f}, {solved:.1%} of held-out problems solved")
    if solved < config.target_accuracy:
        raise UserError(
            f"the warm start solved {solved:.3f} of the held-out problems after warm_start.max_steps = {config.max_steps} steps, less than"
            f" target_accuracy = {config.target_accuracy}; raise max_steps or warm_start.lr."
        )
    console.say(f"warm start: {solved:.1%} of held-out problems solved after {step} steps")
    return solved


def worked_sample(problem: Problem, codec: TextCodec) -> Sample:
    """A problem with its worked answer as the response."""
    prompt = codec.prompt(problem)
    return Sample(torch.tensor(prompt + codec.answer(problem)), len(prompt))


def negative_log_likelihood(batch: MicroBatch, scores: TokenScores) -> tuple[torch.Tensor, float]:
    """The supervised objective, a sum over tokens."""
    loss = -scores.logprobs.sum()
    return loss, float(loss.detach())


def share_solved(trainer: MegatronTrainer, examples: list[Sample]) -> float:
    """Share of examples whose every answer token is the most likely one: what greedy decoding would write."""
    is_top = trainer.score(examples).is_top
    lengths = [example.response_length for example in examples]
    return sum(bool(part.all()) for part in is_top.split(lengths)) / len(examples)
