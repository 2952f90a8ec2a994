"""What a correction and a policy loss can be told; every value is checked when the object is made."""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator


class Settings(BaseModel):
    """A section of a configuration: keys that it does not know are refused, numbers are finite, true is no number."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _is_of_its_kind(cls, value: Any, info: ValidationInfo) -> Any:
        kind = cls.model_fields[info.field_name].annotation
        if isinstance(value, bool) and bool not in (kind, *get_args(kind)):
            raise ValueError(f"{str(value).lower()} is no value for it; allowed: {_kind_in_words(kind)}")
        if isinstance(value, str) and "\0" in value:
            raise ValueError("it holds a NUL character; remove it")
        return value


def _kind_in_words(kind: Any) -> str:
    return {int: "a whole number", float: "a number"}.get(next(iter(get_args(kind)), kind), "another kind of value")


class CorrectionConfig(Settings):
    """How a token's weight follows from the mismatch ratio k = p / q (p: train probability, q: rollout probability).

    Raises:
        ValueError: (pydantic's ValidationError) an unknown key, or a value outside its range; both are named.
    """

    method: Literal["cis", "tis", "none"] = Field(
        "cis",
        description="cis: min(k, 1 + lam * max(1 - p, kappa)). tis: min(k, cap). none: 1.",
    )
    lam: float = Field(2.3, ge=0, description="cis: the log-odds displacement is capped at log(1 + lam).")
    kappa: float = Field(5e-3, ge=0, le=1, description="cis: smallest 1 - p in the cap, so that sure tokens keep room for rounding.")
    cap: float = Field(2.0, gt=0, description="tis: the largest weight C.")
    mode: Literal["recompute", "bypass"] = Field(
        "recompute",
        description=(
            "recompute: a forward pass before the first minibatch gives the old policy's log-probs, the ratio is r = pi_theta / pi_old"
            " and the weights are fixed for the rollout batch. bypass: no such pass, pi_old is the rollout policy; ppo then takes no"
            " token weight, since r holds the mismatch, and reinforce forms its weights from the current policy in each micro-batch."
        ),
    )


class LossConfig(Settings):
    """The policy loss of one token.

    Raises:
        ValueError: (pydantic's ValidationError) an unknown key, or a value outside its range; both are named.
    """

    name: Literal["reinforce", "ppo"] = Field(
        "reinforce", description="reinforce: -A * w * log pi. ppo: -w * min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)."
    )
    clip_low: float = Field(0.2, ge=0, le=1, description="ppo: r is clipped below at 1 - clip_low.")
    clip_high: float = Field(0.28, ge=0, description="ppo: r is clipped above at 1 + clip_high.")
    entropy_coeff: float = Field(0.0, ge=0, description="Entropy bonus: entropy_coeff * entropy is subtracted from the loss, unweighted.")


def check_combination(correction: CorrectionConfig, loss: LossConfig) -> None:
    """Refuses a method that the mode and the loss would leave without effect.

    Raises:
        ValueError: names the three keys and what to change.
    """
    if correction.mode == "bypass" and loss.name == "ppo" and correction.method != "none":
        raise ValueError(
            f"correction.method = '{correction.method}' has no effect with correction.mode = 'bypass' and loss.name = 'ppo',"
            " whose ratio pi_theta / pi_rollout already holds the mismatch; set correction.method=none, or loss.name=reinforce,"
            " or correction.mode=recompute."
        )
