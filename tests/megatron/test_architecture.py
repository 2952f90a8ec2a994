"""A config.json is read with its types; a wrong value is refused by file, key and value."""

import json

import pytest

from megatron_tim.errors import UserError
from megatron_tim.megatron.architecture import read_architecture

GOOD = {
    "model_type": "qwen3_moe",
    "vocab_size": 512,
    "hidden_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "intermediate_size": 192,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024,
    "decoder_sparse_step": 2,
    "rope_theta": 1e6,
    "torch_dtype": "bfloat16",
}


def read(tmp_path, **changes):
    (tmp_path / "config.json").write_text(json.dumps({key: value for key, value in (GOOD | changes).items() if value != "absent"}))
    return read_architecture(tmp_path)


def test_values_are_taken_over(tmp_path):
    arch = read(tmp_path)
    assert (arch.hidden_size, arch.head_dim, arch.rope_theta, arch.moe_layers) == (96, 24, 1e6, (1, 3))
    assert arch.norm_topk_prob is True and arch.tie_word_embeddings is False
    assert read(tmp_path, head_dim=32, rope_theta="absent", rope_parameters={"rope_theta": 5e5}).head_dim == 32
    assert read(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 5e5}).rope_theta == 5e5
    assert read(tmp_path, rope_theta="absent").rope_theta == 10000
    assert read(tmp_path, num_experts="absent", num_local_experts=16).num_experts == 16


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": "64"}, "hidden_size = '64' is refused"),
        ({"hidden_size": 64.5}, "hidden_size = 64.5 is refused"),
        ({"hidden_size": True}, "hidden_size = True is refused"),
        ({"num_key_value_heads": 0}, "num_key_value_heads = 0 is refused"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3 must divide num_attention_heads = 4"),
        ({"num_hidden_layers": -1}, "num_hidden_layers = -1 is refused"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9 exceeds num_experts = 8"),
        ({"num_experts": "absent"}, "key 'num_experts' is missing"),
        ({"norm_topk_prob": "no"}, "norm_topk_prob = 'no' is refused"),
        ({"rms_norm_eps": None}, "rms_norm_eps = None is refused"),
        ({"rms_norm_eps": 0}, "rms_norm_eps = 0 is refused"),
        ({"max_position_embeddings": None}, "max_position_embeddings = None is refused"),
        ({"rope_parameters": "x"}, "rope_parameters = 'x' is refused"),
        ({"rope_scaling": [1]}, "rope_scaling = [1] is refused"),
        ({"rope_scaling": {"type": "yarn"}}, "RoPE of type 'yarn' is not supported"),
        ({"rope_theta": "x"}, "rope_theta = 'x' is refused"),
        ({"rope_theta": -1}, "rope_theta = -1 is refused"),
        ({"tie_word_embeddings": "true"}, "tie_word_embeddings = 'true' is refused"),
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
    ],
)
def test_a_wrong_value_is_named(tmp_path, changes, words):
    with pytest.raises(UserError) as refusal:
        read(tmp_path, **changes)
    assert words in str(refusal.value) and str(tmp_path / "config.json") in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000, "\x00"])
def test_no_json_object_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json (cannot be read|must hold a JSON object)"):
        read_architecture(tmp_path)
