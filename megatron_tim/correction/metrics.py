"""What a correction did and how large the mismatch was, under verl's names where the quantity is verl's.

The metrics (prefix ``rollout_corr/``; k is the mismatch ratio of a token, C is ``cap``; a token counts when it is
in the mask and both its log-probs are finite, whether or not a rule rejects it):

- ``rollout_is_mean|min|max``: k before any truncation. ``rollout_is_std``, ``rollout_is_eff_sample_size``
  (E[w]^2 / E[w^2], at most 1): k clipped to [1/C, C], as verl forms them. ``rollout_is_ratio_fraction_high|low``:
  share of tokens with k above C, below 1/C.
- ``weight_mean|std|min|max|eff_sample_size``: the weights, before rejection. ``capped_share``: share of tokens whose token
  weight is below k; ``zero_weight_share``: whose weight is 0. With a sequence weight ``sequence_weight_mean|min|max`` and
  ``sequence_capped_share``, over sequences.
- ``rollout_rs_masked_fraction``, ``rollout_rs_seq_masked_fraction``: share of tokens that the rules reject, and of sequences
  that lose any; ``rollout_rs_STATISTIC_LEVEL_masked_fraction``: the tokens that one rule rejects.
- ``kl``, ``k3_kl``: mean of -log k and of k - 1 - log k, both estimates of KL(rollout || train). ``chi2_token``: E[k^2] - 1.
- ``training_ppl``, ``rollout_ppl``, ``ppl_ratio``, ``training_log_ppl``, ``rollout_log_ppl``, ``log_ppl_diff``, ``log_ppl_abs_diff``,
  ``log_ppl_diff_max|min``, ``chi2_seq``: means over sequences of their own perplexities, log-perplexities and prod k^2 - 1.
- ``bias``, ``abs_bias``, ``variance`` ...: see :mod:`megatron_tim.correction.bias`; the same of exact correction under ``exact/``.
- ``tokens``, ``sequences``, ``nonfinite_tokens``, ``nonfinite_share``: what there was, and what was dropped.

Each shadow method NAME has its weight, rejection and bias metrics under ``shadow/NAME/``. The displacement has its own,
:mod:`megatron_tim.correction.displacement_metrics`, and so has the choice of lam, :mod:`megatron_tim.correction.lam`.
Without any token every metric is 0.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_tim.correction.bias import EXACT, bias_metrics
from megatron_tim.correction.displacement import LOG_RATIO_BOUND
from megatron_tim.correction.displacement_metrics import displacement_metrics
from megatron_tim.correction.lam import lam_metrics
from megatron_tim.correction.objective_metrics import summarise_objective
from megatron_tim.correction.sums import MetricSums, largest, mean, total
from megatron_tim.correction.tokens import TokenBatch

if TYPE_CHECKING:
    from megatron_tim.correction.weigh import Weighing

ACTIVE = "correction/"
SHADOW = "shadow/"
# A perplexity above exp(88) overflows float32, so verl's would be inf; here it stays finite for the sum's sake.
LOG_PERPLEXITY_BOUND = 88.0


def token_sums(tokens: TokenBatch, cap: float) -> MetricSums:
    """Sums over tokens that do not depend on the method.

    Args:
        tokens: the batch.
        cap: C of the metrics that verl forms with its threshold.
    """
    # Sums of k - 1 keep the digits that E[k^2] - E[k]^2 would cancel when k is close to 1; invalid tokens add 0 to them.
    excess = tokens.excess
    low, high = sorted((1 / cap, cap))
    clipped = excess.clamp(low - 1, high - 1)
    sums = {
        "tokens": tokens.mask,
        "nonfinite": tokens.mask & ~tokens.valid,
        "ratio_excess": excess,
        "clipped_excess": clipped,
        "clipped_excess_squared": clipped.square(),
        "chi2_token": excess * (excess + 2),
        "ratio_high": excess > high - 1,
        "ratio_low": excess < low - 1,
        "kl": -tokens.log_ratio,
        "k3_kl": excess - tokens.log_ratio,
    }
    maxima = {"ratio_max": largest(excess, tokens.valid), "ratio_minus_min": largest(-excess, tokens.valid)}
    return MetricSums({name: total(values) for name, values in sums.items()}, maxima).with_prefix(ACTIVE)


def sequence_sums(tokens: TokenBatch) -> MetricSums:
    """Sums over sequences that do not depend on the method; a sequence without valid tokens does not count."""
    length = tokens.length
    present = length > 0
    train, rollout = (-tokens.sequence_sum(values) / length.clamp(min=1) for values in (tokens.train, tokens.rollout))
    log_product = tokens.sequence_sum(tokens.log_ratio).clamp(max=LOG_RATIO_BOUND)
    sums = {
        "sequences": present,
        "training_ppl": torch.where(present, _perplexity(train), 0),
        "rollout_ppl": torch.where(present, _perplexity(rollout), 0),
        "ppl_ratio": torch.where(present, _perplexity(train - rollout), 0),
        "training_log_ppl": train,
        "rollout_log_ppl": rollout,
        "log_ppl_diff": train - rollout,
        "log_ppl_abs_diff": (train - rollout).abs(),
        "chi2_seq": torch.expm1(2 * log_product),
    }
    maxima = {
        "log_ppl_diff_max": largest(train - rollout, present),
        "log_ppl_diff_minus_min": largest(rollout - train, present),
    }
    return MetricSums({name: total(values) for name, values in sums.items()}, maxima).with_prefix(ACTIVE)


def weight_sums(tokens: TokenBatch, weighing: Weighing) -> MetricSums:
    """Sums of what a method does, without a prefix."""
    weights, valid = weighing.weights, tokens.valid
    sums = {
        "valid": valid,
        "weight": torch.where(valid, weights, 0),
        "weight_squared": torch.where(valid, weights, 0).square(),
        # Of w - 1, since E[w^2] - E[w]^2 cancels every digit when w is close to 1.
        "weight_excess_squared": torch.where(valid, weights - 1, 0).square(),
        "capped": weighing.capped,
        "zero_weight": valid & (weights == 0),
    }
    maxima = {"weight_max": largest(weights, valid), "weight_minus_min": largest(-weights, valid)}
    if weighing.by_rule:
        sums |= {f"rejected/{name}": rejected for name, rejected in weighing.by_rule.items()}
        sums |= {"rejected": valid & ~weighing.keep, "present": tokens.length > 0}
        sums["rejected_sequences"] = tokens.sequence_sum(valid & ~weighing.keep) > 0
    if weighing.sequence_weights is not None:
        present = tokens.length > 0
        sums |= {"present": present, "sequence_capped": present & weighing.sequence_capped}
        sums["sequence_weight"] = torch.where(present, weighing.sequence_weights, 0)
        maxima["sequence_weight_max"] = largest(weighing.sequence_weights, present)
        maxima["sequence_weight_minus_min"] = largest(-weighing.sequence_weights, present)
    return MetricSums({name: total(values) for name, values in sums.items()}, maxima)


def correction_metrics(sums: MetricSums) -> dict[str, float]:
    """The metrics listed at the top of this file, as far as ``sums`` holds theirs."""
    active = sums.below(ACTIVE)
    if "tokens" not in active.sums:
        return {}
    value = active.to_floats()
    metrics = _token_metrics(value) | _weight_metrics(value) | _sequence_metrics(value) | bias_metrics(active)
    metrics |= {f"exact/{name}": number for name, number in bias_metrics(sums.below(EXACT)).items()}
    metrics = {f"rollout_corr/{name}": number for name, number in metrics.items()}
    for name in _shadow_names(sums):
        shadow = sums.below(f"{SHADOW}{name}/")
        found = _weight_metrics(shadow.to_floats()) | bias_metrics(shadow)
        metrics |= {f"{SHADOW}{name}/{key}": number for key, number in found.items()}
    return metrics | displacement_metrics(sums) | lam_metrics(sums)


def summarise(sums: MetricSums) -> dict[str, float]:
    """Every metric that ``sums`` holds: those of corrections and those of the objective.

    Args:
        sums: of :func:`correct` and :func:`token_objective`, added over micro-batches and all-reduced over ranks.
    """
    return correction_metrics(sums) | summarise_objective(sums)


def _shadow_names(sums: MetricSums) -> list[str]:
    return sorted({name.split("/")[1] for name in sums.sums if name.startswith(SHADOW)})


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
        "rollout_is_eff_sample_size": _effective_share(*_moments(value["clipped_excess"], value["clipped_excess_squared"], count), count),
        "rollout_is_ratio_fraction_high": mean(value["ratio_high"], count),
        "rollout_is_ratio_fraction_low": mean(value["ratio_low"], count),
        "kl": mean(value["kl"], count),
        "k3_kl": mean(value["k3_kl"], count),
        "chi2_token": mean(value["chi2_token"], count),
    }


def _weight_metrics(value: dict[str, float]) -> dict[str, float]:
    count = value["valid"]
    metrics = {
        "weight_mean": mean(value["weight"], count),
        "weight_min": -value["weight_minus_min"] if count else 0.0,
        "weight_max": value["weight_max"] if count else 0.0,
        "weight_std": _std(value["weight"] - count, value["weight_excess_squared"], count),
        "weight_eff_sample_size": _effective_share(value["weight"], value["weight_squared"], count),
        "capped_share": mean(value["capped"], count),
        "zero_weight_share": mean(value["zero_weight"], count),
    }
    if "rejected" in value:
        metrics["rollout_rs_masked_fraction"] = mean(value["rejected"], count)
        metrics["rollout_rs_seq_masked_fraction"] = mean(value["rejected_sequences"], value["present"])
        rules = [name.removeprefix("rejected/") for name in value if name.startswith("rejected/")]
        metrics |= {f"rollout_rs_{rule}_masked_fraction": mean(value[f"rejected/{rule}"], count) for rule in rules}
    if "sequence_weight" in value:
        present = value["present"]
        metrics["sequence_weight_mean"] = mean(value["sequence_weight"], present)
        metrics["sequence_weight_min"] = -value["sequence_weight_minus_min"] if present else 0.0
        metrics["sequence_weight_max"] = value["sequence_weight_max"] if present else 0.0
        metrics["sequence_capped_share"] = mean(value["sequence_capped"], present)
    return metrics


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


def _perplexity(log_perplexity: Tensor) -> Tensor:
    return torch.exp(log_perplexity.clamp(max=LOG_PERPLEXITY_BOUND))


def _std(excess: float, excess_squared: float, count: float) -> float:
    """The population standard deviation of w, from the sums of w - 1 and (w - 1)^2."""
    return math.sqrt(max(0.0, mean(excess_squared, count) - mean(excess, count) ** 2))


def _moments(excess: float, excess_squared: float, count: float) -> tuple[float, float]:
    """The sums of w and w^2, from those of w - 1 and (w - 1)^2."""
    return count + excess, count + 2 * excess + excess_squared


def _effective_share(first: float, second: float, count: float) -> float:
    """E[w]^2 / E[w^2], from the sums of w and w^2; 0 without tokens or when every weight is 0."""
    return first**2 / (count * second) if second > 0 else 0.0
