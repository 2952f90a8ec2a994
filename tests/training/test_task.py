"""Every prompt is checked before the first step, and the tokenizer's files are refused in a sentence."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from megatron_tim.config import DataConfig
from megatron_tim.errors import UserError
from megatron_tim.training.task import Task


def make(tmp_path, train=("one", "two"), held_out=("one",), tokenizer_config='{"eos_token": "<eos>"}', **settings):
    vocabulary = {"<eos>": 0, "<unk>": 1, "one": 2, "two": 3}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(tokenizer_config)
    for name, questions in (("train", train), ("eval", held_out)):
        rows = (json.dumps({"question": question, "answer": "#### 1"}) if question else "" for question in questions)
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    config = DataConfig(train=tmp_path / "train.jsonl", eval=tmp_path / "eval.jsonl", prompt_template="{question}", **settings)
    return Task(tmp_path, config, prompts_per_step=1, seed=1)


def test_prompts_are_the_rows_and_ids_of_their_problems(tmp_path):
    task = make(tmp_path, train=("one two two", "two"))
    assert task.prompts(task.training) == [(0, [2, 3, 3]), (1, [3])]
    assert task.longest_prompt == 3 and task.codec.eos_id == 0


@pytest.mark.parametrize("name", ["train", "eval"])
def test_a_long_prompt_is_named_by_its_line_before_any_step(tmp_path, name):
    questions = ("one", "", "one two two two")  # the blank line counts as a line
    with pytest.raises(UserError, match=rf"{name}.jsonl, line 3: the prompt has 4 tokens, allowed are 1 to data.max_prompt_tokens = 3"):
        make(tmp_path, **{"train" if name == "train" else "held_out": questions}, max_prompt_tokens=3)


def test_half_a_character_is_refused_by_its_line(tmp_path):
    with pytest.raises(UserError, match=r"train.jsonl, line 2: field 'question' holds '\\ud800', half of a character"):
        make(tmp_path, train=("one", "\ud800"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "is a JSON list"),
        ("{", "cannot be read"),
        ("{}", "eos_token = None is not in the vocabulary"),
        ('{"eos_token": {}}', "eos_token = None is not in the vocabulary"),
        ('{"eos_token": 5}', "eos_token = 5 is not in the vocabulary"),
        ('{"eos_token": {"content": "</s>"}}', "eos_token = '</s>' is not in the vocabulary"),
    ],
)
def test_a_tokenizer_without_an_end_is_refused(tmp_path, text, words):
    with pytest.raises(UserError) as refusal:
        make(tmp_path, tokenizer_config=text)
    assert words in str(refusal.value) and "tokenizer_config.json" in str(refusal.value)
