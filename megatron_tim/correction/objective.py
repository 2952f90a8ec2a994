"""The objective of a micro-batch: what the trainer differentiates, as sums over tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_tim.correction.config import CorrectionConfig, LossConfig, check_combination
from megatron_tim.correction.correct import weigh_tokens
from megatron_tim.correction.losses import policy_loss
from megatron_tim.correction.objective_metrics import PREFIX, objective_sums
from megatron_tim.correction.sums import MetricSums, total
from megatron_tim.correction.validation import check_token_tensors, finite_tokens


def token_objective(
    logprobs: Tensor,
    entropy: Tensor | None,
    *,
    old_logprobs: Tensor | None,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor | None,
    correction: CorrectionConfig,
    loss: LossConfig,
) -> tuple[Tensor, MetricSums]:
    """The policy loss minus the entropy bonus, summed over the tokens of one micro-batch, and the sums of its metrics.

    Divide the loss by one denominator for the whole optimizer step: the tokens of ``mask`` over all micro-batches and
    ranks, rejected and dropped ones included. Tokens outside ``mask``, or with a non-finite log-prob, add exactly 0 to the
    loss and to the gradient whatever they hold; a micro-batch without any token gives 0 with its graph attached.

    Args:
        logprobs: any shape, floating point, with gradient: log pi_theta of the sampled tokens.
        entropy: same shape, with gradient, nats; None if it is not wanted, which needs ``loss.entropy_coeff`` = 0.
        old_logprobs: same shape: log pi_old, in recompute mode; None in bypass mode.
        rollout_logprobs: same shape: log pi_rollout.
        advantages: same shape.
        mask: bool, same shape: the tokens that the policy sampled.
        weights: same shape: those of :func:`correct` in recompute mode; None in bypass mode, where they are formed here
            from the current policy.
        correction: the method and the mode.
        loss: the policy loss.

    Returns:
        The loss sum (a scalar, fp32 or fp64) and the sums that :func:`summarise` turns into metrics.

    Raises:
        ValueError: an input that the mode needs is missing or has no meaning in it, or has a wrong shape or dtype.
    """
    optional = {"entropy": entropy, "old_logprobs": old_logprobs, "weights": weights}
    _check_presence(optional, correction, loss)
    given = {name: values for name, values in optional.items() if values is not None}
    check_token_tensors("logprobs", logprobs=logprobs, rollout_logprobs=rollout_logprobs, advantages=advantages, mask=mask, **given)
    bypass = correction.mode == "bypass"
    valid = finite_tokens(mask, logprobs, rollout_logprobs, *(() if bypass else (old_logprobs,)))
    logprobs = _zero_outside(valid, logprobs)
    rollout_logprobs, advantages = (_zero_outside(valid, values.detach()) for values in (rollout_logprobs, advantages))
    old_logprobs = None if bypass else _zero_outside(valid, old_logprobs.detach())

    sums = MetricSums()
    if bypass:
        now = weigh_tokens(logprobs, rollout_logprobs, mask, valid, correction)
        weights, sums = now.weights, now.sums
    reference = rollout_logprobs if bypass else old_logprobs
    token_loss, flags = policy_loss(logprobs, reference, advantages, _zero_outside(valid, weights), loss)
    loss_sum = token_loss.sum()
    sums += objective_sums(logprobs.detach(), old_logprobs, rollout_logprobs, advantages, mask, valid, flags)
    sums += MetricSums({f"{PREFIX}pg_loss": total(token_loss.detach())})
    if entropy is not None:
        entropy = _zero_outside(mask & torch.isfinite(entropy), entropy)
        sums += MetricSums({f"{PREFIX}entropy": total(entropy.detach())})
        loss_sum = loss_sum - loss.entropy_coeff * entropy.sum()
    return loss_sum, sums


def _zero_outside(valid: Tensor, values: Tensor) -> Tensor:
    """``values`` in fp32 or better, 0 outside ``valid``: selected before any arithmetic, so that a NaN reaches no gradient."""
    return torch.where(valid, values.to(torch.promote_types(values.dtype, torch.float32)), 0)


def _check_presence(optional: dict[str, Tensor | None], correction: CorrectionConfig, loss: LossConfig) -> None:
    """Each mode takes its own inputs: weights both given and formed here, or neither, would be a silent error."""
    check_combination(correction, loss)
    for name in ("old_logprobs", "weights"):
        if correction.mode == "recompute" and optional[name] is None:
            raise ValueError(f"{name} is None; recompute mode needs the {name} of the old policy, one for each token.")
        if correction.mode == "bypass" and optional[name] is not None:
            raise ValueError(f"{name} is given; in bypass mode there is no old policy and it must be None.")
    if optional["entropy"] is None and loss.entropy_coeff > 0:
        raise ValueError(f"entropy is None; loss.entropy_coeff = {loss.entropy_coeff:g} needs it.")
