"""Samples packed into micro-batches by a token budget, the same number for every data-parallel rank."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


@dataclass(frozen=True)
class Sample:
    """One sequence to score or train on.

    ``tokens`` is int64 ``[P + R]``; the last R are scored, each from the row before it. ``fields``
    are per scored token ``[R]`` (rollout log-probs, advantages, mask, ...) and travel with them.
    """

    tokens: Tensor
    prompt_length: int
    fields: dict[str, Tensor] = field(default_factory=dict)

    @property
    def response_length(self) -> int:
        return len(self.tokens) - self.prompt_length


@dataclass(frozen=True)
class MicroBatch:
    """Sequences packed end to end (thd).

    ``rows`` int64 ``[n]`` are the packed rows that predict the n scored tokens ``targets``, sequence
    by sequence; ``cu_seqlens`` int64 ``[sequences + 1]`` delimits the sequences among those n;
    ``indices`` are the samples' numbers in the list that was packed.
    """

    input_ids: Tensor
    position_ids: Tensor
    packed_seq_params: PackedSeqParams
    rows: Tensor
    targets: Tensor
    cu_seqlens: Tensor
    fields: dict[str, Tensor]
    indices: tuple[int, ...]
    row_starts: tuple[int, ...]


def plan_micro_batches(lengths: list[int], budget: int, data_parallel_size: int) -> list[list[list[int]]]:
    """Assigns sequences to ``plan[rank][micro_batch]``, balanced by tokens.

    Longest first, each into the emptiest micro-batch; the number of micro-batches is the smallest
    for which none is over ``budget``, or over the longest sequence where that is longer. A pure function of its
    arguments: every rank computes the same plan. Micro-batches may be empty when there are fewer
    sequences than ranks.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    limit = max(budget, max(lengths, default=0))
    count = max(1, -(-sum(lengths) // (limit * data_parallel_size)))
    while True:
        bins = [(0, number, []) for number in range(count * data_parallel_size)]
        for i in order:
            total, number, members = heapq.heappop(bins)
            heapq.heappush(bins, (total + lengths[i], number, [*members, i]))
        if max(total for total, _, _ in bins) <= limit:
            break
        count += 1
    members = [sorted(m) for _, _, m in sorted(bins, key=lambda b: b[1])]
    return [members[rank::data_parallel_size] for rank in range(data_parallel_size)]


def pack(samples: list[Sample], indices: list[int], device: torch.device, pad_to_multiple: int = 1) -> MicroBatch:
    """Packs ``samples[i] for i in indices``.

    No sequence is dropped and none is split. An empty list, or a total that is no multiple of
    ``pad_to_multiple`` (sequence parallelism shards rows), is completed by a sequence of zeros that
    scores nothing.
    """
    chosen = [samples[i] for i in indices]
    tokens = [sample.tokens for sample in chosen]
    total = sum(len(t) for t in tokens)
    padding = -total % pad_to_multiple or (pad_to_multiple if total == 0 else 0)
    if padding:
        tokens.append(torch.zeros(padding, dtype=torch.int64))
    lengths = torch.tensor([len(t) for t in tokens])
    starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    rows = [torch.arange(s.prompt_length - 1, len(s.tokens) - 1) + start for s, start in zip(chosen, starts.tolist(), strict=False)]
    responses = torch.tensor([0] + [s.response_length for s in chosen])
    cu_packed = starts.to(device=device, dtype=torch.int32)
    longest = int(lengths.max())
    return MicroBatch(
        input_ids=torch.cat(tokens)[None].to(device),
        position_ids=torch.cat([torch.arange(n) for n in lengths.tolist()])[None].to(device),
        packed_seq_params=PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=cu_packed, cu_seqlens_kv=cu_packed, max_seqlen_q=longest, max_seqlen_kv=longest
        ),
        rows=_cat(rows, torch.int64).to(device),
        targets=_cat([s.tokens[s.prompt_length :] for s in chosen], torch.int64).to(device),
        cu_seqlens=responses.cumsum(0).to(device),
        fields=_pack_fields(samples, chosen, device),
        indices=tuple(indices),
        row_starts=tuple(starts.tolist()[: len(chosen)]),
    )


def _pack_fields(samples: list[Sample], chosen: list[Sample], device: torch.device) -> dict[str, Tensor]:
    """Every field of the samples, concatenated; empty ones keep their dtype so that all ranks agree."""
    template = samples[0].fields if samples else {}
    return {name: _cat([s.fields[name] for s in chosen], like.dtype).to(device) for name, like in template.items()}


def _cat(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat(parts) if parts else torch.empty(0, dtype=dtype)
