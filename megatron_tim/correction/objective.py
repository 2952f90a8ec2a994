"""The objective of a micro-batch: what the trainer differentiates, as sums over tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_tim.correction.config import CorrectionConfig, check_combination
from megatron_tim.correction.correct import correct_checked
from megatron_tim.correction.loss_config import LossConfig
from megatron_tim.correction.losses import policy_loss, reference_kl
from megatron_tim.correction.objective_metrics import PREFIX, objective_sums
from megatron_tim.correction.sums import MetricSums, total
from megatron_tim.correction.validation import check_layout, check_token_tensors, finite_tokens


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
    reference_logprobs: Tensor | None = None,
    coefficients: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, MetricSums]:
    """Policy loss + kl_coeff * KL - entropy_coeff * entropy, summed over the tokens of one micro-batch, and its metrics' sums.

    Divide the loss by one denominator for the whole optimizer step, the :func:`denominator_parts` of all micro-batches and
    ranks. Tokens outside ``mask``, or with a non-finite log-prob, add exactly 0 to the loss and to the gradient whatever they
    hold; a micro-batch without any token gives 0 with its graph attached. The correction's weights multiply the policy loss alone.

    In bypass mode r = pi_theta / pi_rollout is the mismatch itself. ppo and gspo clip it and take no weight, at most
    rejection; reinforce takes the weight f(sg(pi_theta) / pi_rollout); cispo takes that f in place of its clipped r,
    unless the method is none.

    Args:
        logprobs: ``[B, T]``, or ``[T]`` with ``cu_seqlens`` (any shape where nothing looks at sequences: recompute mode
            and no gspo), floating point, with gradient: log pi_theta of the sampled tokens.
        entropy: same shape, with gradient, nats; None if it is not wanted, which needs ``loss.entropy_coeff`` = 0.
        old_logprobs: same shape: log pi_old, in recompute mode; None in bypass mode.
        rollout_logprobs: same shape: log pi_rollout.
        advantages: same shape.
        mask: bool, same shape: the tokens that the policy sampled.
        weights: same shape: those of :func:`correct` in recompute mode; None in bypass mode, where they are formed here
            from the current policy.
        correction: the method and the mode.
        loss: the policy loss.
        reference_logprobs: same shape: log pi_ref; None where ``loss.kl_coeff`` = 0.
        coefficients: same shape: those of :func:`token_coefficients`; None for 1.
        cu_seqlens: int32 or int64 ``[N + 1]``, the packed sequences.

    Returns:
        The loss sum (a scalar, fp32 or fp64) and the sums that :func:`summarise` turns into metrics.

    Raises:
        ValueError: an input that the mode needs is missing or has no meaning in it, or has a wrong shape or dtype.
    """
    bypass = correction.mode == "bypass"
    optional = {"entropy": entropy, "old_logprobs": old_logprobs, "weights": weights, "reference_logprobs": reference_logprobs}
    _check_presence(optional, correction, loss)
    given = {name: values for name, values in (optional | {"coefficients": coefficients}).items() if values is not None}
    check_token_tensors("logprobs", logprobs=logprobs, rollout_logprobs=rollout_logprobs, advantages=advantages, mask=mask, **given)
    if bypass or loss.name == "gspo":
        check_layout("logprobs", logprobs, cu_seqlens)
    valid = finite_tokens(mask, logprobs, rollout_logprobs, *(() if bypass else (old_logprobs,)))
    finite_reference = None if reference_logprobs is None else finite_tokens(mask, logprobs, reference_logprobs)
    all_logprobs, logprobs = logprobs, _zero_outside(valid, logprobs)
    rollout_logprobs, advantages = (_zero_outside(valid, values.detach()) for values in (rollout_logprobs, advantages))
    old_logprobs = None if bypass else _zero_outside(valid, old_logprobs.detach())
    scale = mask.float() if coefficients is None else coefficients.detach()

    sums = MetricSums()
    if bypass:
        now = correct_checked(logprobs, rollout_logprobs, mask, valid, correction, cu_seqlens)
        weights, sums = now.weights, now.sums
    in_place_of_ratio = bypass and loss.name == "cispo" and correction.has_weight
    base = logprobs.detach() if in_place_of_ratio else rollout_logprobs if bypass else old_logprobs
    token_loss, flags = policy_loss(logprobs, base, advantages, _zero_outside(valid, weights), loss, valid=valid, cu_seqlens=cu_seqlens)
    terms = {"pg_loss": scale * token_loss}
    if reference_logprobs is not None:
        current, reference = (_zero_outside(finite_reference, values) for values in (all_logprobs, reference_logprobs))
        terms["kl_loss"] = scale * reference_kl(current, reference, loss.kl_estimator)
    if entropy is not None:
        terms["entropy"] = scale * _zero_outside(mask & torch.isfinite(entropy), entropy)
    sums += objective_sums(logprobs.detach(), old_logprobs, rollout_logprobs, advantages, mask, valid, flags)
    sums += MetricSums({PREFIX + name: total(term.detach()) for name, term in terms.items()})
    factors = {"pg_loss": 1.0, "kl_loss": loss.kl_coeff, "entropy": -loss.entropy_coeff}
    return sum(factors[name] * term.sum() for name, term in terms.items()), sums


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
    for name, coefficient in {"entropy": loss.entropy_coeff, "reference_logprobs": loss.kl_coeff}.items():
        key = {"entropy": "entropy_coeff", "reference_logprobs": "kl_coeff"}[name]
        if optional[name] is None and coefficient > 0:
            raise ValueError(f"{name} is None; loss.{key} = {coefficient:g} needs it.")
