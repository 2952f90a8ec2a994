"""Text to token ids and back, with the model's own tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from megatron_tim.config import DataConfig
from megatron_tim.errors import UserError
from megatron_tim.training.data import Problem


class TextCodec:
    """Prompts and answers of problems as token ids.

    Ids are made once, before sampling; a response is only ever decoded, never tokenised again. Reads
    ``tokenizer.json`` directly: importing transformers would cost every rank seconds.

    Raises:
        UserError: the model folder has no usable tokenizer, or no end-of-sequence token.
    """

    def __init__(self, hf_path: Path, config: DataConfig) -> None:
        path = hf_path / "tokenizer.json"
        if not path.is_file():
            raise UserError(f"model folder {hf_path} has no tokenizer.json; save its fast tokenizer there.")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"{path} cannot be read: {error}.") from None
        self._config = config
        self.eos_id = self._eos_id(hf_path / "tokenizer_config.json")

    def prompt(self, problem: Problem) -> list[int]:
        """The prompt's ids.

        Raises:
            UserError: it is longer than data.max_prompt_tokens.
        """
        ids = self._encode(self._config.prompt_template.replace("{question}", problem.question))
        if len(ids) > self._config.max_prompt_tokens:
            raise UserError(
                f"problem {problem.index} has a prompt of {len(ids)} tokens, more than data.max_prompt_tokens ="
                f" {self._config.max_prompt_tokens}; raise the limit or drop the problem."
            )
        return ids

    def answer(self, problem: Problem) -> list[int]:
        """The ids of the worked answer, ended by the end-of-sequence token."""
        return [*self._encode(problem.answer), self.eos_id]

    def text(self, ids: np.ndarray) -> str:
        """The text of a response, without special tokens."""
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=True)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _eos_id(self, path: Path) -> int:
        try:
            token = json.loads(path.read_text(encoding="utf-8")).get("eos_token")
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read: {error}.") from None
        token = token["content"] if isinstance(token, dict) else token
        number = self._tokenizer.token_to_id(token) if token else None
        if number is None:
            raise UserError(f"{path}: eos_token = {token!r} is not in the vocabulary, so no response could end.")
        return number
