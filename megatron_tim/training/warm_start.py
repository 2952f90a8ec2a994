"""Supervised steps through the training path, until sampling from the model would earn a chosen mean reward."""

from __future__ import annotations

import torch

from megatron_tim.config import OptimizerConfig, WarmStartConfig
from megatron_tim.correction import MetricSums
from megatron_tim.errors import UserError
from megatron_tim.megatron.logprobs import TokenScores
from megatron_tim.megatron.packing import MicroBatch, Sample
from megatron_tim.megatron.trainer import MegatronTrainer
from megatron_tim.training.console import RunConsole
from megatron_tim.training.data import Problem, PromptSampler, load_problems
from megatron_tim.training.task import Task
from megatron_tim.training.text import TextCodec


def warm_start(
    trainer: MegatronTrainer, task: Task, config: WarmStartConfig, optimizer: OptimizerConfig, seed: int, console: RunConsole
) -> float:
    """Imitates the worked answers of ``config.data`` until the expected reward of held-out problems is ``config.target_reward``.

    The expected reward of a problem is the probability of its right answer, which teacher forcing
    gives without sampling.

    Returns:
        The expected reward at the end.

    Raises:
        UserError: ``config.max_steps`` did not suffice.
    """
    trainer.new_optimizer(optimizer, lr=config.lr)
    worked = load_problems(config.data) if config.data else task.training
    sampler = PromptSampler(worked, config.batch_size, seed)
    held_out = [worked_sample(problem, task.codec) for problem in task.held_out[: config.problems]]
    expected, step = expected_reward(trainer, held_out), 0
    while expected < config.target_reward and step < config.max_steps:
        step += 1
        samples = [worked_sample(problem, task.codec) for problem in sampler.batch(step)]
        tokens = sum(sample.response_length for sample in samples)
        loss = trainer.step(samples, negative_log_likelihood, tokens).sums.to_floats()["nll"] / tokens
        if step % config.check_every == 0 or step == config.max_steps:
            expected = expected_reward(trainer, held_out)
            console.progress(f"warm start: step {step}, loss {loss:.3f}, expected reward {expected:.3f}")
    if expected < config.target_reward:
        raise UserError(
            f"the warm start reached an expected reward of {expected:.3f} in warm_start.max_steps = {config.max_steps} steps, less than"
            f" warm_start.target_reward = {config.target_reward}; raise max_steps or warm_start.lr."
        )
    console.say(f"Warm start: {step} steps, expected reward {expected:.3f}.")
    return expected


def worked_sample(problem: Problem, codec: TextCodec) -> Sample:
    """A problem with its worked answer as the response."""
    [prompt] = codec.prompts([problem])
    return Sample(torch.tensor(prompt + codec.answer(problem)), len(prompt))


def negative_log_likelihood(batch: MicroBatch, scores: TokenScores) -> tuple[torch.Tensor, MetricSums]:
    """The supervised objective, a sum over tokens."""
    loss = -scores.logprobs.sum()
    return loss, MetricSums({"nll": loss.detach().double()})


def expected_reward(trainer: MegatronTrainer, examples: list[Sample]) -> float:
    """Mean over examples of the probability of the whole answer: the mean reward that sampling at temperature 1 would earn."""
    logprobs = trainer.score(examples).logprobs
    answers = logprobs.split([example.response_length for example in examples])
    return torch.stack([answer.sum() for answer in answers]).exp().mean().item()
