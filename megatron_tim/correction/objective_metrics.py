"""How far the policy has moved and what that does to the objective, against pi_old and against pi_rollout.

For each form of the ratio, ``recompute`` (r = pi_theta / pi_old) and ``bypass`` (r = pi_theta / pi_rollout), the metrics
under ``objective/FORM/`` are:

- ``contribution_positive``, ``contribution_negative``: mean of C(r) = -(r - 1) A over the tokens with A > 0 and with A < 0. A
  mismatch shows as a skew that depends on the sign.
- ``k1``, ``k3``: mean of -log r and of r - 1 - log r. Before a collapse the recompute form stays flat while the bypass form
  rises (VeXact, arXiv 2605.14220): both are needed.

The recompute form needs old_logprobs and is absent in bypass mode. Of the loss: ``actor/pg_loss`` and ``actor/entropy`` (verl's
names; means over the mask), ``actor/ppo_kl`` (verl's; k1 of the ratio that the loss uses), and for ppo ``actor/pg_clipfrac``
(verl's) with its parts ``objective/clip_high`` and ``objective/clip_low``. ``objective/tokens``, ``objective/nonfinite_tokens``
count what there was and what was dropped.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_tim.correction.config import LossConfig
from megatron_tim.correction.displacement import LOG_RATIO_BOUND
from megatron_tim.correction.losses import policy_loss
from megatron_tim.correction.sums import MetricSums, mean, total
from megatron_tim.correction.validation import check_token_tensors, finite_tokens

PREFIX = "objective/"


def objective_metrics(
    current_logprobs: Tensor,
    old_logprobs: Tensor | None,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    loss: LossConfig | None = None,
) -> dict[str, float]:
    """C(r) by the sign of A, K1 and K3 in recompute and bypass form, and how often ``loss`` clips.

    Args:
        current_logprobs: any shape, floating point: log pi_theta of the sampled tokens.
        old_logprobs: same shape: log pi_old; None in bypass mode, which leaves the recompute form out.
        rollout_logprobs: same shape: log pi_rollout.
        advantages: same shape.
        mask: bool, same shape. Tokens with a non-finite log-prob are dropped and counted.
        loss: the policy loss whose clip fractions are wanted.

    Raises:
        ValueError: a wrong shape, dtype or device; names the argument and the value.
    """
    bypass = old_logprobs is None
    old_given = {} if bypass else {"old_logprobs": old_logprobs}
    given = {"rollout_logprobs": rollout_logprobs, "advantages": advantages, **old_given}
    check_token_tensors("current_logprobs", current_logprobs=current_logprobs, mask=mask, **given)
    valid = finite_tokens(mask, current_logprobs, rollout_logprobs, *old_given.values())
    current, rollout, advantages = (
        torch.where(valid, values.detach().double(), 0) for values in (current_logprobs, rollout_logprobs, advantages)
    )
    old = None if bypass else torch.where(valid, old_logprobs.detach().double(), 0)
    flags = {}
    if loss is not None:
        _, flags = policy_loss(current, rollout if bypass else old, advantages, torch.ones_like(current), loss)
    return summarise_objective(objective_sums(current, old, rollout, advantages, mask, valid, flags))


def objective_sums(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    valid: Tensor,
    flags: dict[str, Tensor],
) -> MetricSums:
    """The sums behind the metrics of tokens; the floating-point tensors hold 0 where ``valid`` does not."""
    positive, negative = advantages > 0, advantages < 0
    sums = {"tokens": mask, "nonfinite": mask & ~valid, "positive": positive, "negative": negative}
    sums |= {name: valid & flag for name, flag in flags.items()}
    for form, reference in {"recompute": old_logprobs, "bypass": rollout_logprobs}.items():
        if reference is not None:
            log_ratio = logprobs.double() - reference.double()
            excess = torch.expm1(log_ratio.clamp(max=LOG_RATIO_BOUND))
            contribution = -excess * advantages
            sums |= {
                f"{form}/contribution_positive": torch.where(positive, contribution, 0),
                f"{form}/contribution_negative": torch.where(negative, contribution, 0),
                f"{form}/k1": -log_ratio,
                f"{form}/k3": excess - log_ratio,
            }
    return MetricSums({PREFIX + name: total(values) for name, values in sums.items()})


def summarise_objective(sums: MetricSums) -> dict[str, float]:
    """The metrics listed at the top of this file, as far as ``sums`` holds them; 0 where there was no token."""
    value = {name.removeprefix(PREFIX): number for name, number in sums.to_floats().items() if name.startswith(PREFIX)}
    if not value:
        return {}
    count = value["tokens"] - value["nonfinite"]
    forms = [form for form in ("recompute", "bypass") if f"{form}/k1" in value]
    metrics = {f"{PREFIX}tokens": value["tokens"], f"{PREFIX}nonfinite_tokens": value["nonfinite"]}
    for form in forms:
        for sign in ("positive", "negative"):
            metrics[f"{PREFIX}{form}/contribution_{sign}"] = mean(value[f"{form}/contribution_{sign}"], value[sign])
        for estimate in ("k1", "k3"):
            metrics[f"{PREFIX}{form}/{estimate}"] = mean(value[f"{form}/{estimate}"], count)
    metrics["actor/ppo_kl"] = metrics[f"{PREFIX}{forms[0]}/k1"]
    if "clip_high" in value:
        for side in ("clip_high", "clip_low"):
            metrics[PREFIX + side] = mean(value[side], count)
        metrics["actor/pg_clipfrac"] = mean(value["clip_high"] + value["clip_low"], count)
    for name in ("pg_loss", "entropy"):
        if name in value:
            metrics[f"actor/{name}"] = mean(value[name], value["tokens"])
    return metrics
