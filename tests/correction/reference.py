"""Every quantity of the correction once more, in plain Python loops over float64, from the formulas alone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_tim.correction import CorrectionConfig, LossConfig, Method, RejectionRule
from tests.correction.batches import Token


def weight(token: Token, config: Method) -> float:
    """The token weight."""
    k = math.exp(bound(token.train - token.rollout))
    low, high = {"icepop": (0.5, 5.0), "band": (0.5, 2.0)}.get(config.method, (0.0, 0.0))
    low, high = (low if config.low is None else config.low), (high if config.high is None else config.high)
    if config.method == "tis":
        return min(k, config.cap)
    if config.method == "cis":
        return min(k, 1 + config.lam * max(1 - math.exp(token.train), config.kappa))
    if config.method == "band":
        return min(max(k, low), high)
    if config.method == "icepop":
        return k if low <= k <= high else 0.0
    if config.method == "kpop":
        return k if max(kpop_divergences(token)) <= config.phi else 0.0
    return k if config.method == "exact" else 1.0


def kpop_divergences(token: Token) -> tuple[float, float]:
    p, q = (min(max(math.exp(logprob), 1e-6), 1 - 1e-6) for logprob in (token.train, token.rollout))

    def kl(a: float, b: float) -> float:
        return a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b))

    return kl(p, q), kl(q, p)


def sequence_ratio(row: list[Token], config: Method) -> float:
    logs = [token.train - token.rollout for token in row if is_valid(token)]
    total = math.fsum(logs) / (len(logs) if config.length_normalised and logs else 1)
    return math.exp(bound(total))


def sequence_weight(row: list[Token], config: Method) -> float:
    name = config.method if config.method.startswith("seq_") else config.sequence
    ratio = sequence_ratio(row, config)
    if name == "none":
        return 1.0
    if name == "seq_tis":
        return min(ratio, config.sequence_cap)
    return ratio if ratio <= config.sequence_cap else 0.0


def statistic(token: Token, name: str) -> float:
    log = token.train - token.rollout
    k = math.exp(bound(log))
    return {"k1": -log, "k2": log**2 / 2, "k3": k - 1 - log, "ratio": log}[name]


def rejected_by(row: list[Token], rule: RejectionRule) -> list[bool]:
    """Whether the rule drops each token of the sequence, valid or not."""
    low, high = (-math.inf if rule.low is None else rule.low), (math.inf if rule.high is None else rule.high)
    if rule.statistic == "k1" and rule.low is None:
        low = -high
    if rule.statistic == "ratio":
        low, high = (math.log(low) if low > 0 else -math.inf), math.log(high)
    values = [statistic(token, rule.statistic) for token in row if is_valid(token)]
    if rule.level == "token":
        return [is_valid(token) and not low <= statistic(token, rule.statistic) <= high for token in row]
    if rule.level == "sequence_max":
        return [any(not low <= value <= high for value in values)] * len(row)
    total = math.fsum(values) / (len(values) if rule.level == "sequence_mean" and values else 1)
    return [not low <= total <= high] * len(row)


def edges(row: list[Token], rule: RejectionRule) -> list[float]:
    """Distances of everything the rule compares from its bounds: rounding may decide the small ones."""
    bounds = [value for value in (rule.low, rule.high) if value is not None]
    bounds += [-value for value in bounds]
    if rule.statistic == "ratio":
        bounds = [math.log(value) for value in bounds if value > 0]
    values = [statistic(token, rule.statistic) for token in row if is_valid(token)]
    total = math.fsum(values)
    return [abs(value - bound_) for value in [*values, total, total / max(1, len(values))] for bound_ in bounds]


@dataclass
class Weighed:
    """What a method makes of a valid token: its weight before rejection, and the rules that reject it."""

    token: Token
    weight: float
    rejected_by: list[str]


def weigh(rows: list[list[Token]], config: Method) -> list[list[Weighed | None]]:
    """A :class:`Weighed` for each valid token, None for the others."""
    found = []
    for row in rows:
        factor = sequence_weight(row, config)
        dropped = {rule.name: rejected_by(row, rule) for rule in config.reject}
        found.append(
            [
                Weighed(token, factor * weight(token, config), [name for name, flags in dropped.items() if flags[place]])
                if is_valid(token)
                else None
                for place, token in enumerate(row)
            ]
        )
    return found


def is_valid(token: Token) -> bool:
    return token.sampled and math.isfinite(token.train) and math.isfinite(token.rollout)


def correction_metrics(rows: list[list[Token]], config: CorrectionConfig) -> dict[str, float]:
    """The metrics of :func:`megatron_tim.correction.correct` without its diagnostics, with their prefix."""
    sampled = [token for row in rows for token in row if token.sampled]
    valid = [token for token in sampled if is_valid(token)]
    logs = [token.train - token.rollout for token in valid]
    ks = [math.exp(bound(log)) for log in logs]
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
        "kl": average(-log for log in logs),
        "k3_kl": average(k - 1 - log for k, log in zip(ks, logs, strict=True)),
        "chi2_token": average(k * k - 1 for k in ks),
    }
    metrics |= weight_metrics(rows, config) | sequence_metrics(rows)
    return {f"rollout_corr/{name}": value for name, value in metrics.items()}


def weight_metrics(rows: list[list[Token]], config: Method) -> dict[str, float]:
    per_row = [[item for item in row if item] for row in weigh(rows, config)]
    found = [item for row in per_row for item in row]
    weights = [item.weight for item in found]
    capped = [weight(item.token, config) < math.exp(bound(item.token.train - item.token.rollout)) for item in found]
    metrics = {
        "weight_mean": average(weights),
        "weight_min": min(weights, default=0),
        "weight_max": max(weights, default=0),
        "weight_std": deviation(weights),
        "weight_eff_sample_size": effective_share(weights),
        "capped_share": average(map(float, capped)),
        "zero_weight_share": average(float(w == 0) for w in weights),
    }
    present = [row for row in per_row if row]
    if config.reject:
        metrics["rollout_rs_masked_fraction"] = average(float(bool(item.rejected_by)) for item in found)
        metrics["rollout_rs_seq_masked_fraction"] = average(float(any(item.rejected_by for item in row)) for row in present)
        for rule in config.reject:
            metrics[f"rollout_rs_{rule.name}_masked_fraction"] = average(float(rule.name in item.rejected_by) for item in found)
    if config.sequence != "none" or config.method.startswith("seq_"):
        kept = [row for row in rows if any(map(is_valid, row))]
        factors = [sequence_weight(row, config) for row in kept]
        metrics |= {
            "sequence_weight_mean": average(factors),
            "sequence_weight_min": min(factors, default=0),
            "sequence_weight_max": max(factors, default=0),
            "sequence_capped_share": average(float(f < sequence_ratio(row, config)) for f, row in zip(factors, kept, strict=True)),
        }
    return metrics


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


def bias_metrics(rows: list[list[Token]], config: Method) -> dict[str, float]:
    """Truncation bias and variance of the weights, 0 where rejected, whole and by confidence."""
    found = [item for row in weigh(rows, config) for item in row if item]
    weights = [0.0 if item.rejected_by else item.weight for item in found]
    ks = [math.exp(bound(item.token.train - item.token.rollout)) for item in found]
    rooms = [-math.expm1(item.token.train) for item in found]
    bins = [confidence(math.exp(item.token.train)) for item in found]
    scored = [g * f for g, f in zip(rooms, weights, strict=True)]
    middle, scored_middle = average(weights), average(scored)
    terms = {
        "bias": [k - f for k, f in zip(ks, weights, strict=True)],
        "abs_bias": [abs(k - f) for k, f in zip(ks, weights, strict=True)],
        "variance": [(f - middle) ** 2 for f in weights],
        "score_bias": [g * (k - f) for g, k, f in zip(rooms, ks, weights, strict=True)],
        "score_abs_bias": [g * abs(k - f) for g, k, f in zip(rooms, ks, weights, strict=True)],
        "score_variance": [(value - scored_middle) ** 2 for value in scored],
    }
    metrics = {name: average(values) for name, values in terms.items()}
    for name in ("bias", "abs_bias", "variance"):
        for number, label in enumerate(("p_below_0.5", "p_0.5_0.9", "p_0.9_0.99", "p_0.99_0.999", "p_above_0.999")):
            part = [value for value, place in zip(terms[name], bins, strict=True) if place == number]
            metrics[f"{name}/{label}"] = math.fsum(part) / max(1, len(found))
    return metrics


def confidence(p: float) -> int:
    return sum(p >= edge for edge in (0.5, 0.9, 0.99, 0.999))


def token_loss(token: Token, token_weight: float, log_ratio: float, config: LossConfig) -> tuple[float, float]:
    """The loss of a token and its derivative by the current log-prob; ``log_ratio`` is the log of its r."""
    a = token.advantage
    if config.name == "reinforce":
        return -a * token_weight * token.current, -a * token_weight
    ratio = math.exp(bound(log_ratio))
    default_low, default_high = {"ppo": (0.2, 0.28), "gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0)}[config.name]
    low = 1 - (default_low if config.clip_low is None else config.clip_low)
    high = 1 + (default_high if config.clip_high is None else config.clip_high)
    clipped = min(max(ratio, low), high)
    if config.name == "cispo":
        return -a * token_weight * clipped * token.current, -a * token_weight * clipped
    loss = -min(ratio * a, clipped * a)
    slope = -ratio * a if ratio * a <= clipped * a else 0.0
    if config.dual_clip is not None and a < 0 and loss > -config.dual_clip * a:
        loss, slope = -config.dual_clip * a, 0.0
    return token_weight * loss, token_weight * slope


def log_ratios(row: list[Token], base: str, config: LossConfig) -> list[float]:
    """log r of each token of a sequence against the log-prob called ``base``; their mean for gspo."""
    logs = [token.current - getattr(token, base) for token in row]
    return [average(logs)] * len(logs) if config.name == "gspo" else logs


def quantile(values: list[float], share: float) -> float:
    """The smallest value with at least ``share`` of the values at or below it."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else 0.0


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
