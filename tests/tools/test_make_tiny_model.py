"""The tiny model: it loads in transformers, its tokenizer takes any text, its sizes are those that were asked for."""

from __future__ import annotations

import math
from pathlib import Path

import make_arithmetic
import make_tiny_model
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from megatron_tim.errors import UserError

SMALL = ["--layers", "2", "--hidden", "64", "--experts", "4", "--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--moe-ffn", "32"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("arithmetic") / "data"
    make_arithmetic.main(["--out", str(folder), "--train", "500"])
    return folder / "train.jsonl"


@pytest.fixture(scope="module")
def model_folder(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_model.main(["--out", str(folder), "--data", str(corpus), *SMALL])
    return folder


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_folder)


def test_it_loads_in_float32_and_scores_about_uniformly(model_folder: Path, tokenizer) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    assert model.dtype == torch.float32
    assert (model.config.num_experts, model.config.num_experts_per_tok, model.config.num_hidden_layers) == (4, 2, 2)
    ids = tokenizer("Ann has 3 coins.\n#### 3", return_tensors="pt").input_ids
    with torch.no_grad():
        loss = model(ids, labels=ids).loss.item()
    assert abs(loss - math.log(512)) < 0.5


def test_weights_are_float32_untied_and_norms_are_one(model_folder: Path) -> None:
    with safe_open(model_folder / "model.safetensors", "pt") as weights:
        names = list(weights.keys())
        assert "lm_head.weight" in names
        assert "model.layers.1.mlp.experts.3.gate_proj.weight" in names
        assert "model.layers.0.self_attn.q_norm.weight" in names
        for name in names:
            value = weights.get_tensor(name)
            assert value.dtype == torch.float32
            if "norm" in name:
                assert torch.equal(value, torch.ones_like(value))
            else:
                assert 0.03 < value.std().item() < 0.07


def test_special_tokens_agree_between_tokenizer_and_configs(model_folder: Path, tokenizer) -> None:
    from transformers import AutoConfig, GenerationConfig

    for config in (AutoConfig.from_pretrained(model_folder), GenerationConfig.from_pretrained(model_folder)):
        assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (
            tokenizer.pad_token_id,
            tokenizer.bos_token_id,
            tokenizer.eos_token_id,
        )
    assert tokenizer.eos_token_id not in tokenizer("Ann has 3 coins.").input_ids


def test_every_id_is_a_token(tokenizer) -> None:
    assert sorted(tokenizer.get_vocab().values()) == list(range(512))


def test_digits_and_the_answer_mark_are_single_tokens(tokenizer) -> None:
    assert [tokenizer.decode(token) for token in tokenizer("#### 1234").input_ids] == ["#### ", "1", "2", "3", "4"]


def test_prompts_are_short(tokenizer) -> None:
    assert len(tokenizer("Hugo has 14 books and loses 12. How many now?\n").input_ids) < 20


@given(text=st.text(max_size=60))
def test_any_text_round_trips(tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_the_seed_decides_the_weights(corpus: Path, model_folder: Path, tmp_path: Path) -> None:
    for seed in ("1", "2"):
        make_tiny_model.main(["--out", str(tmp_path / seed), "--data", str(corpus), "--seed", seed, *SMALL])
    assert (tmp_path / "1" / "model.safetensors").read_bytes() == (model_folder / "model.safetensors").read_bytes()
    assert (tmp_path / "2" / "model.safetensors").read_bytes() != (model_folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--heads", "8", "--kv-heads", "3"], ["--heads 8", "--kv-heads 3"]),
        (["--topk", "9"], ["--topk 9", "--experts 8"]),
        (["--head-dim", "31"], ["--head-dim 31", "even"]),
        (["--vocab", "100"], ["--vocab 100", "259"]),
        (["--layers", "0"], ["--layers"]),
        (["--init-std", "0"], ["--init-std"]),
        (["--init-std", "nan"], ["--init-std"]),
    ],
)
def test_nonsense_is_refused_by_name(corpus: Path, tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    with pytest.raises(UserError) as refusal:
        make_tiny_model.main(["--out", str(tmp_path / "model"), "--data", str(corpus), *arguments])
    assert all(word in str(refusal.value) for word in words)
    assert list(tmp_path.iterdir()) == []


def test_a_bad_corpus_is_refused_by_line(tmp_path: Path) -> None:
    corpus = tmp_path / "train.jsonl"
    corpus.write_text('{"question": "q", "answer": "a"}\n{"question": "q"}\n')
    with pytest.raises(UserError, match="line 2"):
        make_tiny_model.main(["--out", str(tmp_path / "model"), "--data", str(corpus)])
    with pytest.raises(UserError, match="cannot be read"):
        make_tiny_model.main(["--out", str(tmp_path / "model"), "--data", str(tmp_path / "absent.jsonl")])
