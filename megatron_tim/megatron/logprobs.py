"""Log-probability and entropy of chosen tokens from vocabulary-parallel logits, in bounded memory.

Only the logits themselves are held. The forward pass turns ``chunk_tokens`` rows at a time into two
numbers each; the backward pass recomputes the softmax of a chunk and writes the gradient over the
chunk's logits, which nothing reads afterwards: the linear layer that made them keeps its input.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class TokenScores(NamedTuple):
    """Per token ``[n]``: log-prob and entropy in nats, and whether no token of the vocabulary is more likely (bool)."""

    logprobs: Tensor
    entropy: Tensor
    is_top: Tensor


def token_logprobs(
    logits: Tensor,
    rows: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
    group: dist.ProcessGroup | None = None,
) -> TokenScores:
    """log softmax(logits / temperature)[target] and the entropy of that distribution, for chosen rows.

    The temperature divides the logits (a log-prob cannot be divided by it). Softmax and sums are in
    float32, or in float64 for float64 logits. ``logits`` is overwritten by its gradient in the
    backward pass, so it can be run once.

    Args:
        logits: ``[tokens, vocab / tp]``, any float dtype, this rank's slice of the vocabulary.
        rows: int64 ``[n]``, distinct rows of ``logits`` to read.
        targets: int64 ``[n]``, vocabulary ids, the same on every rank of ``group``.
        temperature: > 0.
        chunk_tokens: rows in float32 at a time.
        group: ranks that share the vocabulary, in order of their slices; None for one rank.

    Raises:
        ValueError: the temperature or chunk size is not positive, or shapes do not agree.
    """
    if not temperature > 0:
        raise ValueError(f"temperature = {temperature} is refused: the logits are divided by it, so it must be > 0")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens = {chunk_tokens} is refused: at least one row is needed")
    if logits.dim() != 2 or rows.dim() != 1 or rows.shape != targets.shape:
        raise ValueError(
            f"expected logits [tokens, vocab] and rows, targets of one shape [n], got logits {tuple(logits.shape)},"
            f" rows {tuple(rows.shape)}, targets {tuple(targets.shape)}"
        )
    return TokenScores(*_TokenLogprobs.apply(logits, rows, targets, temperature, chunk_tokens, group))


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, rows, targets, temperature, chunk_tokens, group):
        logprobs, entropy, log_z = (logits.new_empty(len(rows), dtype=_wide(logits.dtype)) for _ in range(3))
        is_top = torch.empty(len(rows), dtype=torch.bool, device=logits.device)
        for chunk in _chunks(len(rows), chunk_tokens):
            x = _scaled(logits, rows[chunk], temperature)
            peak = _all_reduce(x.amax(-1), dist.ReduceOp.MAX, group)
            x -= peak[:, None]
            chosen = _all_reduce(_pick(x, _local(targets[chunk], x.shape[-1], group)), dist.ReduceOp.SUM, group)
            weight = x.exp()
            total = torch.stack([weight.sum(-1), _weighted_sum(weight, x)])
            z, weighted = _all_reduce(total, dist.ReduceOp.SUM, group)
            is_top[chunk] = chosen == 0  # its logit is the peak
            logprobs[chunk] = chosen - z.log()
            entropy[chunk] = z.log() - weighted / z
            log_z[chunk] = peak + z.log()
        ctx.save_for_backward(logits, rows, targets, log_z, entropy)
        ctx.temperature, ctx.chunk_tokens, ctx.group = temperature, chunk_tokens, group
        ctx.mark_non_differentiable(is_top)
        return logprobs, entropy, is_top

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy, _):
        logits, rows, targets, log_z, entropy = ctx.saved_tensors
        for chunk in _chunks(len(rows), ctx.chunk_tokens):
            logp = _scaled(logits, rows[chunk], ctx.temperature).sub_(log_z[chunk, None])
            p = logp.exp()
            # d logprob / dx = onehot - p and d entropy / dx = -p (log p + entropy); p = 0 contributes nothing.
            slope = logp.masked_fill_(p == 0, 0.0).add_(entropy[chunk, None]).mul_(-grad_entropy[chunk, None])
            grad = slope.sub_(grad_logprobs[chunk, None]).mul_(p)
            _add_at(grad, _local(targets[chunk], grad.shape[-1], ctx.group), grad_logprobs[chunk])
            logits[rows[chunk]] = grad.div_(ctx.temperature).to(logits.dtype)
        unread = torch.ones(logits.shape[0], dtype=torch.bool, device=logits.device)
        unread[rows] = False
        logits[unread] = 0
        return logits, None, None, None, None, None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _chunks(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def _scaled(logits: Tensor, rows: Tensor, temperature: float) -> Tensor:
    """A copy of some rows in the wide dtype, divided by the temperature."""
    return logits[rows].to(_wide(logits.dtype)).div_(temperature)


def _weighted_sum(weight: Tensor, x: Tensor) -> Tensor:
    """sum of weight * x, where a weight of 0 makes x = -inf count for nothing."""
    return (weight * x.masked_fill(weight == 0, 0.0)).sum(-1)


def _local(targets: Tensor, width: int, group: dist.ProcessGroup | None) -> Tensor:
    """Column of each target in this rank's slice; negative or >= ``width`` where another rank holds it."""
    return targets - (dist.get_rank(group) * width if _is_shared(group) else 0)


def _pick(x: Tensor, columns: Tensor) -> Tensor:
    """``x[i, columns[i]]``, 0 where the column is not held here."""
    held = (columns >= 0) & (columns < x.shape[-1])
    picked = x.gather(-1, columns.clamp(0, x.shape[-1] - 1)[:, None])[:, 0]
    return torch.where(held, picked, torch.zeros_like(picked))


def _add_at(grad: Tensor, columns: Tensor, amount: Tensor) -> None:
    held = (columns >= 0) & (columns < grad.shape[-1])
    grad.scatter_add_(-1, columns.clamp(0, grad.shape[-1] - 1)[:, None], torch.where(held, amount, 0.0)[:, None])


def _is_shared(group: dist.ProcessGroup | None) -> bool:
    return group is not None and dist.get_world_size(group) > 1


def _all_reduce(x: Tensor, op: dist.ReduceOp, group: dist.ProcessGroup | None) -> Tensor:
    if _is_shared(group):
        dist.all_reduce(x, op=op, group=group)
    return x
