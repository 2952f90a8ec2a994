"""Modules that replace Megatron's local ones where those refuse what a packed MoE model needs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm that, unlike Megatron's local one, works under sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        # Tells Megatron to sum this weight's gradient over the sequence shards.
        self.weight.sequence_parallel = config.sequence_parallel


class PackedAttention(DotProductAttention):
    """Causal attention within each sequence of a packed (thd) batch; Megatron's local one refuses packing.

    Sequences are laid out as rows of one padded batch for a single fused call. Padding follows the
    tokens, so a causal mask alone keeps it from reaching them.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: object = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Query ``[t, heads, d]``, key and value ``[t, kv_heads, d]`` to ``[t, heads * d]``."""
        if packed_seq_params is None:
            return super().forward(query, key, value, attention_mask, attn_mask_type, attention_bias)
        lengths = packed_seq_params.cu_seqlens_q.diff()
        columns = torch.arange(packed_seq_params.max_seqlen_q, device=query.device)
        is_token = columns < lengths[:, None]  # [sequences, longest]
        groups = query.shape[1] // key.shape[1]
        rows = [_unpack(x, is_token) for x in (query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1))]
        out = F.scaled_dot_product_attention(*rows, is_causal=True, scale=self.softmax_scale)
        return out.transpose(1, 2)[is_token].flatten(1)


def _unpack(packed: Tensor, is_token: Tensor) -> Tensor:
    """``[t, heads, d]`` to ``[sequences, heads, longest, d]``, zeros after each sequence's end."""
    padded = packed.new_zeros(*is_token.shape, *packed.shape[1:])
    padded[is_token] = packed
    return padded.transpose(1, 2)
