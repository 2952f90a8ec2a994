"""Which tokens count, and refusals of wrong inputs: a ValueError whose sentence names the argument and the value."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

# A log-softmax in low precision or over a sharded vocabulary can land this far above 0; more is a wrong input,
# such as probabilities or negative log-likelihoods.
POSITIVE_ROUNDING = 1e-3


def finite_tokens(mask: Tensor, *logprobs: Tensor) -> Tensor:
    """The tokens of ``mask`` at which every one of ``logprobs`` is finite."""
    for values in logprobs:
        mask = mask & torch.isfinite(values)
    return mask


def check_token_tensors(like: str, **tensors: Tensor) -> None:
    """Requires floating-point tensors with the shape and device of the one called ``like``, the first of them.

    Reads only metadata, so that it can run in every micro-batch. A tensor named ``mask`` must be bool instead.

    Raises:
        ValueError: names the argument, what it is and what it must be.
    """
    model = tensors[like]
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor.")
        if name == "mask" and tensor.dtype != torch.bool:
            raise ValueError(f"mask has dtype {tensor.dtype}; it must be torch.bool, True on the tokens that the policy sampled.")
        if name != "mask" and not tensor.is_floating_point():
            raise ValueError(f"{name} has dtype {tensor.dtype}; it must be floating point.")
        if tensor.shape != model.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must have the shape of {like}, {tuple(model.shape)}.")
        if tensor.device != model.device:
            raise ValueError(f"{name} is on {tensor.device}; it must be on the device of {like}, {model.device}.")


def check_layout(name: str, logprobs: Tensor, cu_seqlens: Tensor | None) -> None:
    """Requires padded ``[B, T]`` without ``cu_seqlens``, or packed ``[T]`` with offsets that fit it.

    Raises:
        ValueError: names the argument and the value.
    """
    shape = tuple(logprobs.shape)
    if cu_seqlens is None:
        if logprobs.dim() != 2:
            raise ValueError(f"{name} has shape {shape}; without cu_seqlens it must be padded, [B, T].")
        return
    if logprobs.dim() != 1:
        raise ValueError(f"{name} has shape {shape}; with cu_seqlens it must be packed, [T].")
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.dim() != 1:
        kind = f"{cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}" if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise ValueError(f"cu_seqlens is {kind}; it must be an int32 or int64 tensor of shape [N + 1].")
    if cu_seqlens.device != logprobs.device:
        raise ValueError(f"cu_seqlens is on {cu_seqlens.device}; it must be on the device of {name}, {logprobs.device}.")
    _check_offsets(cu_seqlens.tolist(), shape[0])


def check_temperatures(train_temperature: float, rollout_temperature: float) -> None:
    """Requires the log-probs of both engines to be of one temperature.

    Raises:
        ValueError: names the argument and the value.
    """
    for name, temperature in {"train_temperature": train_temperature, "rollout_temperature": rollout_temperature}.items():
        if not (0 < temperature < math.inf):
            raise ValueError(f"{name} = {temperature} has no log-probs to correct with; it must be above 0 and finite.")
    if train_temperature != rollout_temperature:
        raise ValueError(
            f"rollout_temperature = {rollout_temperature} differs from train_temperature = {train_temperature}: a log-prob cannot be"
            " moved to another temperature, only logits can; record the log-probs after temperature, and score with the same one."
        )


def _check_offsets(offsets: list[int], tokens: int) -> None:
    if not offsets or offsets[0] != 0:
        raise ValueError(f"cu_seqlens starts with {offsets[:1]}; it must start with 0.")
    for index, (start, end) in enumerate(pairwise(offsets)):
        if end < start:
            raise ValueError(f"cu_seqlens falls from {start} to {end} at index {index + 1}; it must be increasing.")
    if offsets[-1] != tokens:
        raise ValueError(f"cu_seqlens ends at {offsets[-1]}; it must end at the number of tokens, {tokens}.")


def check_not_positive(name: str, logprobs: Tensor, valid: Tensor) -> None:
    """Requires log-probs of at most 0, up to rounding, where ``valid`` holds.

    Raises:
        ValueError: names the argument, the first offending place and its value.
    """
    wrong = valid & (logprobs > POSITIVE_ROUNDING)
    if wrong.any():
        place = tuple(wrong.nonzero()[0].tolist())
        raise ValueError(
            f"{name}[{', '.join(map(str, place))}] = {logprobs[place].item():.6g} is positive; a log-prob is at most 0"
            f" (up to {POSITIVE_ROUNDING:g} of rounding)."
        )
