"""What a correction did and how large the mismatch was, under verl's names where the quantity is verl's.

The metrics (prefix ``rollout_corr/``; k is the mismatch ratio of a token, C is ``cap``; a token counts when it is
in the mask and both its log-probs are finite):

- ``rollout_is_mean|min|max``: k before any truncation. ``rollout_is_std``, ``rollout_is_eff_sample_size``
  (E[w]^2 / E[w^2], at most 1): k clipped to [1/C, C], as verl forms them. ``rollout_is_ratio_fraction_high|low``:
  share of tokens with k above C, below 1/C.
- ``weight_mean|std|min|max|eff_sample_size``: the weights that were applied. ``capped_share``: share of tokens whose weight is
  below k.
- ``kl``, ``k3_kl``: mean of -log k and of k - 1 - log k, both estimates of KL(rollout || train). ``chi2_token``: E[k^2] - 1.
- ``training_ppl``, ``rollout_ppl``, ``ppl_ratio``, ``training_log_ppl``, ``rollout_log_ppl``, ``log_ppl_diff``, ``log_ppl_abs_diff``,
  ``log_ppl_diff_max|min``, ``chi2_seq``: means over sequences of their own perplexities, log-perplexities and prod k^2 - 1.
- ``tokens``, ``sequences``, ``nonfinite_tokens``, ``nonfinite_share``: what there was, and what was dropped.

Without any token every metric is 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_tim.correction.displacement import LOG_RATIO_BOUND
from megatron_tim.correction.objective_metrics import summarise_objective
from megatron_tim.correction.sequences import sequence_sum
from megatron_tim.correction.sums import MetricSums, largest, mean, total

# A perplexity above exp(88) overflows float32, so verl's would be inf; here it stays finite for the sum's sake.
LOG_PERPLEXITY_BOUND = 88.0


def token_sums(
    train_logprobs: Tensor, rollout_logprobs: Tensor, weights: Tensor, capped: Tensor, mask: Tensor, valid: Tensor, cap: float
) -> MetricSums:
    """Sums over tokens that :func:`correction_metrics` turns into metrics.

    Args:
        train_logprobs, rollout_logprobs, weights: floating point, one shape.
        capped: bool, the valid tokens whose weight is below k.
        mask: bool, the sampled tokens.
        valid: bool, ``mask`` where both log-probs are finite.
        cap: C of the metrics that verl forms with its threshold.
    """
    # Invalid tokens get log k = 0 and weight 1 and drop out of every sum of a difference from 1. Such
    # differences also keep the digits that E[k^2] - E[k]^2 would cancel when k is close to 1.
    log_ratio = torch.where(valid, train_logprobs.double() - rollout_logprobs.double(), 0)
    bounded = log_ratio.clamp(max=LOG_RATIO_BOUND)
    excess = torch.expm1(bounded)
    low, high = sorted((1 / cap, cap))
    clipped = excess.clamp(low - 1, high - 1)
    weight_excess = torch.where(valid, weights.double() - 1, 0)
    sums = {
        "tokens": mask,
        "nonfinite": mask & ~valid,
        "ratio_excess": excess,
        "clipped_excess": clipped,
        "clipped_excess_squared": clipped.square(),
        "chi2_token": torch.expm1(2 * bounded),
        "ratio_high": excess > high - 1,
        "ratio_low": excess < low - 1,
        "weight_excess": weight_excess,
        "weight_excess_squared": weight_excess.square(),
        "capped": capped,
        "kl": -log_ratio,
        "k3_kl": excess - log_ratio,
    }
    maxima = {
        "ratio_max": largest(excess, valid),
        "ratio_minus_min": largest(-excess, valid),
        "weight_max": largest(weights, valid),
        "weight_minus_min": largest(-weights, valid),
    }
    return MetricSums(_named({name: total(values) for name, values in sums.items()}), _named(maxima))


def sequence_sums(train_logprobs: Tensor, rollout_logprobs: Tensor, valid: Tensor, cu_seqlens: Tensor | None) -> MetricSums:
    """Sums over sequences that :func:`correction_metrics` turns into metrics; needs whole sequences.

    Args:
        train_logprobs, rollout_logprobs: floating point, ``[B, T]`` or ``[T]``.
        valid: bool, the tokens that count; a sequence without any does not count.
        cu_seqlens: None, or ``[N + 1]`` for packed ``[T]``.
    """
    length = sequence_sum(valid, cu_seqlens)
    present = length > 0
    train = -sequence_sum(torch.where(valid, train_logprobs.double(), 0), cu_seqlens) / length.clamp(min=1)
    rollout = -sequence_sum(torch.where(valid, rollout_logprobs.double(), 0), cu_seqlens) / length.clamp(min=1)
    log_ratio = (length * (rollout - train)).clamp(max=LOG_RATIO_BOUND)
    sums = {
        "sequences": present,
        "training_ppl": torch.where(present, _perplexity(train), 0),
        "rollout_ppl": torch.where(present, _perplexity(rollout), 0),
        "ppl_ratio": torch.where(present, _perplexity(train - rollout), 0),
        "training_log_ppl": train,
        "rollout_log_ppl": rollout,
        "log_ppl_diff": train - rollout,
        "log_ppl_abs_diff": (train - rollout).abs(),
        "chi2_seq": torch.expm1(2 * log_ratio),
    }
    maxima = {
        "log_ppl_diff_max": largest(train - rollout, present),
        "log_ppl_diff_minus_min": largest(rollout - train, present),
    }
    return MetricSums(_named({name: total(values) for name, values in sums.items()}), _named(maxima))


def correction_metrics(sums: MetricSums) -> dict[str, float]:
    """The metrics listed at the top of this file; those of sequences only where their sums are present."""
    prefix = "correction/"
    value = {name.removeprefix(prefix): number for name, number in sums.to_floats().items() if name.startswith(prefix)}
    if not value:
        return {}
    metrics = _token_metrics(value)
    if "sequences" in value:
        metrics |= _sequence_metrics(value)
    return {f"rollout_corr/{name}": number for name, number in metrics.items()}


def summarise(sums: MetricSums) -> dict[str, float]:
    """Every metric that ``sums`` holds: those of corrections and those of the objective.

    Args:
        sums: of :func:`correct` and :func:`token_objective`, added over micro-batches and all-reduced over ranks.
    """
    return correction_metrics(sums) | summarise_objective(sums)


def _token_metrics(value: dict[str, float]) -> dict[str, float]:
    count = value["tokens"] - value["nonfinite"]
    some = 1.0 if count else 0.0
    return {
        "tokens": value["tokens"],
        "nonfinite_tokens": value["nonfinite"],
        "nonfinite_share": mean(value["nonfinite"], value["tokens"]),
        "rollout_is_mean": some + mean(value["ratio_excess"], count),
        "rollout_is_min": 1 - value["ratio_minus_min"] if count else 0.0,
        "rollout_is_max": 1 + value["ratio_max"] if count else 0.0,
        "rollout_is_std": _std(value["clipped_excess"], value["clipped_excess_squared"], count),
        "rollout_is_eff_sample_size": _effective_share(value["clipped_excess"], value["clipped_excess_squared"], count),
        "rollout_is_ratio_fraction_high": mean(value["ratio_high"], count),
        "rollout_is_ratio_fraction_low": mean(value["ratio_low"], count),
        "weight_mean": some + mean(value["weight_excess"], count),
        "weight_min": -value["weight_minus_min"] if count else 0.0,
        "weight_max": value["weight_max"] if count else 0.0,
        "weight_std": _std(value["weight_excess"], value["weight_excess_squared"], count),
        "weight_eff_sample_size": _effective_share(value["weight_excess"], value["weight_excess_squared"], count),
        "capped_share": mean(value["capped"], count),
        "kl": mean(value["kl"], count),
        "k3_kl": mean(value["k3_kl"], count),
        "chi2_token": mean(value["chi2_token"], count),
    }


def _sequence_metrics(value: dict[str, float]) -> dict[str, float]:
    count = value["sequences"]
    averages = (
        *("training_ppl", "rollout_ppl", "ppl_ratio", "training_log_ppl", "rollout_log_ppl"),
        *("log_ppl_diff", "log_ppl_abs_diff", "chi2_seq"),
    )
    return {
        "sequences": count,
        **{name: mean(value[name], count) for name in averages},
        "log_ppl_diff_max": value["log_ppl_diff_max"] if count else 0.0,
        "log_ppl_diff_min": -value["log_ppl_diff_minus_min"] if count else 0.0,
    }


def _named(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"correction/{name}": value for name, value in values.items()}


def _perplexity(log_perplexity: Tensor) -> Tensor:
    return torch.exp(log_perplexity.clamp(max=LOG_PERPLEXITY_BOUND))


def _std(excess: float, excess_squared: float, count: float) -> float:
    """The population standard deviation of w, from the sums of w - 1 and (w - 1)^2."""
    return math.sqrt(max(0.0, mean(excess_squared, count) - mean(excess, count) ** 2))


def _effective_share(excess: float, excess_squared: float, count: float) -> float:
    """E[w]^2 / E[w^2], from the sums of w - 1 and (w - 1)^2; 0 without tokens or when every weight is 0."""
    if not count:
        return 0.0
    first = mean(excess, count)
    second = 1 + 2 * first + mean(excess_squared, count)
    return (1 + first) ** 2 / second if second > 0 else 0.0
