"""What a run trains on: problems, in their order, as prompts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from megatron_tim.config import DataConfig
from megatron_tim.rollout.source import Prompts
from megatron_tim.training.data import Problem, PromptSampler, load_problems
from megatron_tim.training.text import TextCodec


class Task:
    """Training and held-out problems with the model's tokenizer.

    Raises:
        UserError: a data file or the tokenizer is unsuitable.
    """

    def __init__(self, hf_path: Path, config: DataConfig, prompts_per_step: int, seed: int) -> None:
        self.training = load_problems(config.train)
        self.held_out = load_problems(config.eval)
        self.codec = TextCodec(hf_path, config)
        self._sampler = PromptSampler(self.training, prompts_per_step, seed)

    def problems(self, step: int) -> list[Problem]:
        """The problems of RL step ``step``, from 1: a function of the seed and the step alone."""
        return self._sampler.batch(step)

    def prompts(self, problems: Iterable[Problem]) -> Prompts:
        """The problems' rows in their file and their prompts' token ids."""
        return [(problem.index, self.codec.prompt(problem)) for problem in problems]
