"""Writes a randomly initialised Qwen3-MoE of laptop size, with a tokenizer of its own, in Hugging Face's form.

example: python tools/make_tiny_model.py --out models/tiny-qwen3-moe --data data/arithmetic/train.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from new_folder import new_folder

from megatron_tim.errors import UserError

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
BYTES = 256
# Pieces that merges never cross: the answer mark with its space, a word with its space, one digit, anything else.
PIECES = r"#### | ?\p{L}+|\d|\n| ?[^\s\p{L}\d]+|\s"


def read_texts(path: Path) -> list[str]:
    """Reads the questions and answers of a GSM8K-like JSONL file.

    Raises:
        UserError: the file is missing or a line is not an object with ``question`` and ``answer``.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"--data {path} cannot be read ({error.strerror}); tools/make_arithmetic.py writes such a file.") from None
    return [text for number, line in enumerate(lines, 1) for text in _texts_of(path, number, line)]


def _texts_of(path: Path, number: int, line: str) -> Iterator[str]:
    try:
        problem = json.loads(line)
        yield from (problem["question"] + "\n", problem["answer"])
    except (ValueError, KeyError, TypeError):
        raise UserError(f"--data {path}, line {number}: must be a JSON object with `question` and `answer`.") from None


def make_tokenizer(texts: list[str], vocab_size: int):
    """Trains a byte-level BPE tokenizer of exactly ``vocab_size`` tokens: any text round-trips, digits stay single.

    A corpus too small for that many merges is filled up with unused tokens, so every id that a
    model of this vocabulary can sample has a text.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PIECES), behavior="isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([f"<unused{i}>" for i in range(vocab_size - tokenizer.get_vocab_size())])
    pad, bos, eos = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos, clean_up_tokenization_spaces=False
    )


def make_model(arguments: argparse.Namespace, tokenizer):
    """Builds the model in float32: normal weights, norms 1, untied embeddings, query and key norms as in Qwen3."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.utils import logging

    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=arguments.hidden,
        intermediate_size=2 * arguments.hidden,
        moe_intermediate_size=arguments.moe_ffn,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.heads,
        num_key_value_heads=arguments.kv_heads,
        head_dim=arguments.head_dim,
        num_experts=arguments.experts,
        num_experts_per_tok=arguments.topk,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        tie_word_embeddings=False,
        attention_bias=False,
        max_position_embeddings=2048,
        rms_norm_eps=1e-6,
        initializer_range=arguments.init_std,
        **ids,
    )
    logging.disable_progress_bar()
    torch.manual_seed(arguments.seed)
    model = Qwen3MoeForCausalLM(config).to(torch.float32)
    for name, value in ids.items():
        setattr(model.generation_config, name, value)
    return model


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="new folder of the model")
    parser.add_argument(
        "--data", type=Path, default=Path("data/arithmetic/train.jsonl"), help="JSONL the tokenizer learns from (default: %(default)s)"
    )
    sizes = {"layers": 4, "hidden": 64, "experts": 8, "topk": 2, "heads": 4, "kv-heads": 2, "head-dim": 32, "moe-ffn": 64, "vocab": 512}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help="default: %(default)s")
    parser.add_argument("--init-std", type=float, default=0.05, metavar="X", help="standard deviation of weights (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="default: %(default)s")
    arguments = parser.parse_args(argv)
    for name in sizes:
        if getattr(arguments, name.replace("-", "_")) < 1:
            raise UserError(f"--{name} must be at least 1.")
    check_sizes(arguments)
    return arguments


def check_sizes(arguments: argparse.Namespace) -> None:
    """Refuses sizes that no Qwen3-MoE can have.

    Raises:
        UserError: names the options that contradict each other.
    """
    if arguments.heads % arguments.kv_heads:
        raise UserError(f"--heads {arguments.heads} must be a multiple of --kv-heads {arguments.kv_heads}.")
    if arguments.topk > arguments.experts:
        raise UserError(f"--topk {arguments.topk} must not exceed --experts {arguments.experts}.")
    if arguments.head_dim % 2:
        raise UserError(f"--head-dim {arguments.head_dim} must be even: rotary embeddings turn pairs of channels.")
    if arguments.vocab < BYTES + len(SPECIAL_TOKENS):
        raise UserError(f"--vocab {arguments.vocab} must be at least {BYTES + len(SPECIAL_TOKENS)}: every byte and the special tokens.")
    if not arguments.init_std > 0:
        raise UserError(f"--init-std {arguments.init_std} must be above 0.")


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    texts = read_texts(arguments.data)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with new_folder(arguments.out) as folder:
        tokenizer = make_tokenizer(texts, arguments.vocab)
        model = make_model(arguments, tokenizer)
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
    print(f"{arguments.out}: {model.num_parameters():,} parameters, {len(tokenizer)} tokens")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"make_tiny_model: error: {error}")
