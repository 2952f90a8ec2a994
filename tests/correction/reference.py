"""Every quantity of the correction once more, in plain Python loops over float64, from the formulas alone."""

from __future__ import annotations

import math
from collections.abc import Iterable

from megatron_tim.correction import CorrectionConfig, LossConfig
from tests.correction.batches import Token


def weight(token: Token, config: CorrectionConfig) -> float:
    k = math.exp(token.train - token.rollout)
    if config.method == "none":
        return 1.0
    if config.method == "tis":
        return min(k, config.cap)
    return min(k, 1 + config.lam * max(1 - math.exp(token.train), config.kappa))


def is_valid(token: Token) -> bool:
    return token.sampled and math.isfinite(token.train) and math.isfinite(token.rollout)


def correction_metrics(rows: list[list[Token]], config: CorrectionConfig) -> dict[str, float]:
    """The metrics of :func:`megatron_tim.correction.correct`, with their prefix."""
    sampled = [token for row in rows for token in row if token.sampled]
    valid = [token for token in sampled if is_valid(token)]
    logs = [token.train - token.rollout for token in valid]
    ks = [math.exp(bound(log)) for log in logs]
    weights = [weight(token, config) for token in valid]
    low, high = min(config.cap, 1 / config.cap), max(config.cap, 1 / config.cap)
    clipped = [min(max(k, low), high) for k in ks]
    metrics = {
        "tokens": len(sampled),
        "nonfinite_tokens": len(sampled) - len(valid),
        "nonfinite_share": average(float(not is_valid(token)) for token in sampled),
        "rollout_is_mean": average(ks),
        "rollout_is_min": min(ks, default=0),
        "rollout_is_max": max(ks, default=0),
        "rollout_is_std": deviation(clipped),
        "rollout_is_eff_sample_size": effective_share(clipped),
        "rollout_is_ratio_fraction_high": average(float(k > high) for k in ks),
        "rollout_is_ratio_fraction_low": average(float(k < low) for k in ks),
        "weight_mean": average(weights),
        "weight_min": min(weights, default=0),
        "weight_max": max(weights, default=0),
        "weight_std": deviation(weights),
        "weight_eff_sample_size": effective_share(weights),
        "capped_share": average(float(w < k) for w, k in zip(weights, ks, strict=True)),
        "kl": average(-log for log in logs),
        "k3_kl": average(k - 1 - log for k, log in zip(ks, logs, strict=True)),
        "chi2_token": average(k * k - 1 for k in ks),
    }
    metrics |= sequence_metrics(rows)
    return {f"rollout_corr/{name}": value for name, value in metrics.items()}


def sequence_metrics(rows: list[list[Token]]) -> dict[str, float]:
    kept = [row for row in ([token for token in row if is_valid(token)] for row in rows) if row]
    train = [-average(token.train for token in row) for row in kept]
    rollout = [-average(token.rollout for token in row) for row in kept]
    differences = [t - r for t, r in zip(train, rollout, strict=True)]
    products = [math.exp(bound(math.fsum(token.train - token.rollout for token in row))) for row in kept]
    return {
        "sequences": len(kept),
        "training_ppl": average(map(math.exp, train)),
        "rollout_ppl": average(map(math.exp, rollout)),
        "ppl_ratio": average(map(math.exp, differences)),
        "training_log_ppl": average(train),
        "rollout_log_ppl": average(rollout),
        "log_ppl_diff": average(differences),
        "log_ppl_abs_diff": average(map(abs, differences)),
        "log_ppl_diff_max": max(differences, default=0),
        "log_ppl_diff_min": min(differences, default=0),
        "chi2_seq": average(product * product - 1 for product in products),
    }


def token_loss(token: Token, token_weight: float, reference: float, config: LossConfig) -> tuple[float, float]:
    """The loss of a token and its derivative by the current log-prob."""
    if config.name == "reinforce":
        return -token.advantage * token_weight * token.current, -token.advantage * token_weight
    ratio = math.exp(bound(token.current - reference))
    clipped = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
    loss = -min(ratio * token.advantage, clipped * token.advantage)
    slope = -ratio * token.advantage if ratio * token.advantage <= clipped * token.advantage else 0.0
    return token_weight * loss, token_weight * slope


def bound(log: float) -> float:
    """The logarithm of a ratio, held where the package holds it."""
    return min(log, 20.0)


def average(values: Iterable[float]) -> float:
    values = list(values)
    return math.fsum(values) / len(values) if values else 0.0


def deviation(values: list[float]) -> float:
    middle = average(values)
    return math.sqrt(average((value - middle) ** 2 for value in values))


def effective_share(values: list[float]) -> float:
    second = average(value * value for value in values)
    return average(values) ** 2 / second if second else 0.0
