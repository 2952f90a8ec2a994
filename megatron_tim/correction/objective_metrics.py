"""How far the policy has moved and what that does to the objective, against pi_old and against pi_rollout.

For each form of the ratio, ``recompute`` (r = pi_theta / pi_old) and ``bypass`` (r = pi_theta / pi_rollout), the metrics
under ``objective/FORM/`` are:

- ``contribution_positive``, ``contribution_negative``: mean of C(r) = -(r - 1) A over the tokens with A > 0 and with A < 0, and
  their quantiles ``.../q05``, ``.../median``, ``.../q95``, to within 10 %. A mismatch shows as a skew that depends on the sign.
- ``k1``, ``k3``: mean of -log r and of r - 1 - log r. Before a collapse the recompute form stays flat while the bypass form
  rises (VeXact, arXiv 2605.14220): both are needed.

The recompute form needs old_logprobs and is absent in bypass mode. Of the loss: ``actor/pg_loss`` and ``actor/entropy`` (verl's
names; sums with the loss's coefficients, over the mask's tokens), ``actor/kl_loss`` likewise, ``actor/ppo_kl`` (verl's; k1 of the
ratio to pi_old, in bypass mode to pi_rollout), and for a loss that clips ``actor/pg_clipfrac`` (verl's) with its parts
``objective/clip_high`` and ``objective/clip_low``, and ``actor/pg_clipfrac_lower`` (verl's; the dual clip). ``objective/tokens``,
``objective/nonfinite_tokens`` count what there was and what was dropped.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatron_tim.correction.displacement import LOG_RATIO_BOUND
from megatron_tim.correction.loss_config import LossConfig
from megatron_tim.correction.losses import policy_loss
from megatron_tim.correction.sketch import CONTRIBUTION_EDGES, SMALLEST_CONTRIBUTION, histogram, quantile
from megatron_tim.correction.sums import MetricSums, mean, total
from megatron_tim.correction.validation import check_layout, check_token_tensors, finite_tokens

PREFIX = "objective/"


def objective_metrics(
    current_logprobs: Tensor,
    old_logprobs: Tensor | None,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    loss: LossConfig | None = None,
    cu_seqlens: Tensor | None = None,
) -> dict[str, float]:
    """C(r) by the sign of A, K1 and K3 in recompute and bypass form, and how often ``loss`` clips.

    Args:
        current_logprobs: any shape, floating point: log pi_theta of the sampled tokens.
        old_logprobs: same shape: log pi_old; None in bypass mode, which leaves the recompute form out.
        rollout_logprobs: same shape: log pi_rollout.
        advantages: same shape.
        mask: bool, same shape. Tokens with a non-finite log-prob are dropped and counted.
        loss: the policy loss whose clip fractions are wanted.
        cu_seqlens: ``[N + 1]``, the sequences of a packed ``[T]``, which gspo needs.

    Raises:
        ValueError: a wrong shape, dtype or device; names the argument and the value.
    """
    bypass = old_logprobs is None
    old_given = {} if bypass else {"old_logprobs": old_logprobs}
    given = {"rollout_logprobs": rollout_logprobs, "advantages": advantages, **old_given}
    check_token_tensors("current_logprobs", current_logprobs=current_logprobs, mask=mask, **given)
    if loss is not None and loss.name == "gspo":
        check_layout("current_logprobs", current_logprobs, cu_seqlens)
    valid = finite_tokens(mask, current_logprobs, rollout_logprobs, *old_given.values())
    current, rollout, advantages = (
        torch.where(valid, values.detach().double(), 0) for values in (current_logprobs, rollout_logprobs, advantages)
    )
    old = None if bypass else torch.where(valid, old_logprobs.detach().double(), 0)
    flags = {}
    if loss is not None:
        base, ones = rollout if bypass else old, torch.ones_like(current)
        _, flags = policy_loss(current, base, advantages, ones, loss, valid=valid, cu_seqlens=cu_seqlens)
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
    tables = {}
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
            for sign, chosen in {"positive": positive, "negative": negative}.items():
                tables[f"{form}/contribution_{sign}"] = histogram(contribution.double(), CONTRIBUTION_EDGES, chosen)
    return MetricSums({name: total(values) for name, values in sums.items()}, {}, tables).with_prefix(PREFIX)


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
            name = f"{PREFIX}{form}/contribution_{sign}"
            metrics[name] = mean(value[f"{form}/contribution_{sign}"], value[sign])
            metrics |= {f"{name}/{label}": value for label, value in _quantiles(sums.tables[name].cpu().numpy()).items()}
        for estimate in ("k1", "k3"):
            metrics[f"{PREFIX}{form}/{estimate}"] = mean(value[f"{form}/{estimate}"], count)
    metrics["actor/ppo_kl"] = metrics[f"{PREFIX}{forms[0]}/k1"]
    if "clip_high" in value:
        for side in ("clip_high", "clip_low"):
            metrics[PREFIX + side] = mean(value[side], count)
        metrics["actor/pg_clipfrac"] = mean(value["clip_high"] + value["clip_low"], count)
    if "dual_clip" in value:
        metrics["actor/pg_clipfrac_lower"] = mean(value["dual_clip"], count)
    for name in ("pg_loss", "kl_loss", "entropy"):
        if name in value:
            metrics[f"actor/{name}"] = mean(value[name], value["tokens"])
    return metrics


def _quantiles(counts: np.ndarray) -> dict[str, float]:
    found = {label: quantile(counts, CONTRIBUTION_EDGES, share) for label, share in {"q05": 0.05, "median": 0.5, "q95": 0.95}.items()}
    # The bin around 0 holds every token whose ratio did not move.
    return {label: 0.0 if abs(value) <= SMALLEST_CONTRIBUTION else value for label, value in found.items()}
