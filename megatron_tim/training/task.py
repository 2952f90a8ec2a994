"""What a run trains on: problems, in their order, as prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_tim.config import DataConfig
from megatron_tim.errors import UserError
from megatron_tim.rollout.source import Prompts
from megatron_tim.training.data import Problem, PromptSampler, load_problems
from megatron_tim.training.text import TextCodec


class Task:
    """Training and held-out problems with the model's tokenizer.

    Raises:
        UserError: a data file or the tokenizer is unsuitable, or a prompt is longer than data.max_prompt_tokens.
    """

    def __init__(self, hf_path: Path, config: DataConfig, prompts_per_step: int, seed: int) -> None:
        self.training = load_problems(config.train)
        self.held_out = load_problems(config.eval)
        self.codec = TextCodec(hf_path, config)
        self.longest_prompt = max(
            _longest(path, self.codec.prompts(problems), problems, config.max_prompt_tokens)
            for path, problems in ((config.train, self.training), (config.eval, self.held_out))
        )
        """Tokens of the longest prompt."""
        self._sampler = PromptSampler(self.training, prompts_per_step, seed)

    def problems(self, step: int) -> list[Problem]:
        """The problems of RL step ``step``, from 1: a function of the seed and the step alone."""
        return self._sampler.batch(step)

    def prompts(self, problems: Sequence[Problem]) -> Prompts:
        """The problems' rows in their file and their prompts' token ids."""
        return [(problem.index, ids) for problem, ids in zip(problems, self.codec.prompts(problems), strict=True)]


def _longest(path: Path, prompts: list[list[int]], problems: list[Problem], limit: int) -> int:
    """Tokens of the longest prompt; refuses those that no engine could answer, all of them before the first step."""
    for problem, ids in zip(problems, prompts, strict=True):
        if not 0 < len(ids) <= limit:
            raise UserError(
                f"{path}, line {problem.line}: the prompt has {len(ids)} tokens, allowed are 1 to data.max_prompt_tokens = {limit};"
                " raise the limit or drop the line."
            )
    return max(map(len, prompts))
