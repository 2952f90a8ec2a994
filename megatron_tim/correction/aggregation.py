"""From the losses of tokens to one number: a coefficient for each token, over one global denominator.

The loss of an optimizer step is ``sum(coefficients * losses) / denominator``, the sum over all micro-batches and ranks. Both
are formed before the first micro-batch, from whole sequences, so that no split changes the result:

========================  ====================  =================================
aggregation               coefficient           denominator
========================  ====================  =================================
token_mean                1                     tokens
sequence_mean_token_mean  1 / tokens of its     sequences
                          sequence
sequence_mean_token_sum   1 / length_norm       sequences
========================  ====================  =================================

Tokens are those of the mask, rejected and dropped ones included; with ``shrink_after_rejection`` the caller gives
the kept ones instead. A sequence counts when it has any.
"""

from __future__ import annotations

from torch import Tensor

from megatron_tim.correction.loss_config import LossConfig
from megatron_tim.correction.sequences import sequence_sum, to_tokens


def token_coefficients(counted: Tensor, config: LossConfig, cu_seqlens: Tensor | None = None) -> Tensor:
    """The coefficient of each token, fp32 in the shape of ``counted``, 0 where it is False.

    Args:
        counted: bool ``[B, T]``, or ``[T]`` with ``cu_seqlens``: the tokens that count.
        config: the loss.
        cu_seqlens: None for padded, ``[N + 1]`` for packed.
    """
    coefficients = counted.float()
    if config.aggregation == "sequence_mean_token_mean":
        lengths = to_tokens(sequence_sum(counted, cu_seqlens), counted, cu_seqlens)
        return (coefficients / lengths.clamp(min=1)).float()
    if config.aggregation == "sequence_mean_token_sum":
        return coefficients / config.length_norm
    return coefficients


def denominator_parts(counted: Tensor, config: LossConfig, cu_seqlens: Tensor | None = None) -> Tensor:
    """What each sequence adds to the denominator, float64 ``[B]`` or ``[N]``.

    Sum the parts of all sequences of an optimizer step, over all ranks, and divide by at least 1.
    """
    lengths = sequence_sum(counted, cu_seqlens)
    return lengths if config.aggregation == "token_mean" else (lengths > 0).double()
