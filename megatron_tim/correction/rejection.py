"""Rejection: rules that take tokens or whole sequences out of the policy gradient.

A rule bounds one statistic of the mismatch ratio k = p / q, inclusively, at one level:

==================  ====================================  =============================================
statistic           of a token                            of a sequence, summed
==================  ====================================  =============================================
``k1``              -log k                                sum, or mean: estimates of KL(q || p)
``k2``              (log k)^2 / 2                         likewise
``k3``              k - 1 - log k                         likewise, never negative
``ratio``           k                                     product, or geometric mean
==================  ====================================  =============================================

Levels: ``token`` drops the tokens out of bounds; ``sequence_sum`` and ``sequence_mean`` drop a sequence whose
summed statistic is out of bounds; ``sequence_max`` drops a sequence in which any token is. Every rule
looks at all valid tokens, also at those that another rule drops.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import Field, model_validator
from torch import Tensor

from megatron_tim.correction.settings import Settings
from megatron_tim.correction.tokens import TokenBatch

# What a name in `reject` stands for; every key of it can be overridden beside `rule`.
NAMED_RULES: dict[str, dict[str, Any]] = {
    "k1": {"statistic": "k1", "level": "sequence_mean", "high": 0.001},
    "k2": {"statistic": "k2", "level": "sequence_mean", "high": 0.001},
    "k3": {"statistic": "k3", "level": "sequence_mean", "high": 0.001},
    "geo_rs": {"statistic": "ratio", "level": "sequence_mean", "low": 0.999, "high": 1.001},
    "veto": {"statistic": "ratio", "level": "sequence_max", "low": 1e-4},
}


class RejectionRule(Settings):
    """One rule: a name (``k3``), a name with changes (``{rule: k3, high: 0.01}``), or all of its keys.

    Raises:
        ValueError: (pydantic's ValidationError) an unknown name or key, no bound at all, or bounds that leave nothing.
    """

    statistic: Literal["k1", "k2", "k3", "ratio"] = Field(
        description="k1: -log k. k2: (log k)^2 / 2. k3: k - 1 - log k. ratio: k itself (geometric over a sequence)."
    )
    level: Literal["token", "sequence_sum", "sequence_mean", "sequence_max"] = Field(
        description="What is bounded: each token, or a sequence's sum, its mean, or its worst token."
    )
    low: float | None = Field(None, description="Smallest value kept; null for none. k1 with only `high` takes low = -high.")
    high: float | None = Field(None, description="Largest value kept; null for none.")

    @model_validator(mode="before")
    @classmethod
    def _expand_name(cls, given: Any) -> Any:
        if isinstance(given, str):
            given = {"rule": given}
        if not isinstance(given, dict) or "rule" not in given:
            return given
        name, changes = given["rule"], {key: value for key, value in given.items() if key != "rule"}
        if name not in NAMED_RULES:
            raise ValueError(f"'{name}' is no rejection rule; allowed: {', '.join(NAMED_RULES)}, or statistic, level and bounds")
        return NAMED_RULES[name] | changes

    @model_validator(mode="after")
    def _bounds_leave_something(self) -> RejectionRule:
        if self.low is None and self.high is None:
            raise ValueError(f"the rule {self.name} has neither low nor high; give at least one bound")
        low, high = self.bounds
        if low > high:
            raise ValueError(f"the rule {self.name} has low = {low:g} above high = {high:g} and would reject everything")
        if self.statistic == "ratio" and high <= 0:
            raise ValueError(f"the rule {self.name} has high = {high:g}, but a ratio is above 0: it would reject everything")
        return self

    @property
    def name(self) -> str:
        """Statistic and level, as in the rule's metric."""
        return f"{self.statistic}_{self.level}"

    @property
    def bounds(self) -> tuple[float, float]:
        """(low, high) with infinities for what is not bounded."""
        high = math.inf if self.high is None else self.high
        if self.low is not None:
            return self.low, high
        return (-high if self.statistic == "k1" else -math.inf), high

    @property
    def compared_bounds(self) -> tuple[float, float]:
        """The bounds of what is compared: the logarithm of a ratio, the statistic itself otherwise."""
        low, high = self.bounds
        if self.statistic != "ratio":
            return low, high
        return (math.log(low) if low > 0 else -math.inf), math.log(high)


def reject(tokens: TokenBatch, rules: list[RejectionRule]) -> dict[str, Tensor]:
    """The valid tokens that each rule drops, bool in the tokens' shape, by the rule's name."""
    return {rule.name: tokens.valid & _rejected_by(tokens, rule) for rule in rules}


def _rejected_by(tokens: TokenBatch, rule: RejectionRule) -> Tensor:
    value = _statistic(tokens, rule.statistic)
    if rule.level == "token":
        return _outside(value, rule)
    if rule.level == "sequence_max":
        outside = (_outside(value, rule) & tokens.valid).double()
        return tokens.to_tokens(tokens.sequence_sum(outside) > 0)
    total = tokens.sequence_sum(value)
    if rule.level == "sequence_mean":
        total = total / tokens.length.clamp(min=1)
    return tokens.to_tokens(_outside(total, rule))


def _statistic(tokens: TokenBatch, name: str) -> Tensor:
    """The statistic of each token; the logarithm for ``ratio``, so that products are sums. 0 on invalid tokens."""
    if name == "k1":
        return -tokens.log_ratio
    if name == "k2":
        return tokens.log_ratio.square() / 2
    if name == "k3":
        return tokens.excess - tokens.log_ratio
    return tokens.log_ratio


def _outside(value: Tensor, rule: RejectionRule) -> Tensor:
    low, high = rule.compared_bounds
    return (value < low) | (value > high)
