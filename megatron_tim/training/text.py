"""Text to token ids and back, with the model's own tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
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

    def prompts(self, problems: Sequence[Problem]) -> list[list[int]]:
        """The ids of each problem's prompt."""
        texts = [self._config.prompt_template.replace("{question}", problem.question) for problem in problems]
        return [encoding.ids for encoding in self._tokenizer.encode_batch(texts, add_special_tokens=False)]

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
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{path} cannot be read: {error}.") from None
        if not isinstance(config, dict):
            raise UserError(f"{path} is a JSON {type(config).__name__}; it must be an object with 'eos_token'.")
        token = config.get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        number = self._tokenizer.token_to_id(token) if isinstance(token, str) else None
        if number is None:
            raise UserError(f"{path}: eos_token = {token!r} is not in the vocabulary, so no response could end.")
        return number
