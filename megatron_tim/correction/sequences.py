"""Sums over each sequence, for padded and packed batches alike."""

from __future__ import annotations

import torch
from torch import Tensor


def sequence_sum(values: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The sum over each sequence, float64 ``[B]`` or ``[N]``.

    Args:
        values: padded ``[B, T]`` with 0 on the padding, or packed ``[T]``.
        cu_seqlens: None for padded; for packed the ``[N + 1]`` starts of the sequences, ending in T.
    """
    if cu_seqlens is None:
        return values.sum(dim=-1, dtype=torch.float64)
    # The offsets were checked with the other inputs; the safe variant would check them again and wait for the GPU.
    return torch.segment_reduce(values.double(), "sum", offsets=cu_seqlens.long(), axis=0, unsafe=True)


def to_tokens(values: Tensor, like: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """A value a sequence, ``[B]`` or ``[N]``, at each of its tokens, in the shape of ``like``."""
    if cu_seqlens is None:
        return values.unsqueeze(-1).expand(like.shape)
    return values.repeat_interleave(cu_seqlens.diff().long(), output_size=like.numel())


def sequence_mean(values: Tensor, valid: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The mean over the valid tokens of each sequence, float64, at each of its tokens; 0 for a sequence without any."""
    total = sequence_sum(torch.where(valid, values, 0), cu_seqlens)
    return to_tokens(total / sequence_sum(valid, cu_seqlens).clamp(min=1), values, cu_seqlens)
