"""Small real models for tests, in Hugging Face format."""

from __future__ import annotations

from pathlib import Path

EOS_TOKEN_ID = 2


def make_tiny_qwen3_moe(path: Path, seed: int, *, layers: int = 4, hidden: int = 96, initializer_range: float = 0.15) -> Path:
    """Writes a random float32 Qwen3-MoE: 8 experts top-2, grouped-query attention, qk-norm, 512 tokens.

    The wide initialisation gives peaked distributions and routers with an opinion, so that a wrong
    position, temperature or layer shows up as a large difference.
    """
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        moe_intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=0,
        initializer_range=initializer_range,
    )
    Qwen3MoeForCausalLM(config).float().save_pretrained(path)
    return path
