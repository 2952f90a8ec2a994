"""What a correction can be told; every value is checked when the object is made."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from megatron_tim.correction.lam import AutoLamConfig
from megatron_tim.correction.loss_config import LossConfig
from megatron_tim.correction.presets import PRESETS, expand_preset
from megatron_tim.correction.rejection import RejectionRule
from megatron_tim.correction.settings import Settings

SEQUENCE_METHODS = ("seq_tis", "seq_mis")
# Of the methods with two bounds: icepop's own, and for band the reciprocal of tis's C beside C.
DEFAULT_BOUNDS = {"icepop": (0.5, 5.0), "band": (0.5, 2.0)}


class Method(Settings):
    """A token weight times a sequence weight, and rules that reject: one way to treat the mismatch.

    Raises:
        ValueError: (pydantic's ValidationError) an unknown key, a value outside its range, or keys that contradict each other.
    """

    preset: str | None = Field(
        None, description=f"A named method; sets the keys that make it, and they cannot be changed. One of: {', '.join(PRESETS)}."
    )
    method: Literal["cis", "tis", "none", "exact", "band", "icepop", "kpop", "seq_tis", "seq_mis"] = Field(
        "cis",
        description=(
            "The weight of a token, k = p / q. cis: min(k, 1 + lam * max(1 - p, kappa)). tis: min(k, cap). none: 1. exact: k."
            " band: k clipped to [low, high]. icepop: k inside [low, high], else 0. kpop: k where both binary KLs are at most phi,"
            " else 0. seq_tis, seq_mis: short for method none and that `sequence`."
        ),
    )
    lam: float | Literal["auto"] = Field(
        2.3, description="cis: the log-odds displacement is capped at log(1 + lam). auto: chosen from the measured one, see `auto_lam`."
    )
    kappa: float = Field(5e-3, ge=0, le=1, description="cis: smallest 1 - p in the cap, so that sure tokens keep room for rounding.")
    cap: float = Field(2.0, gt=0, description="tis: the largest weight C. Also the threshold of verl's metrics, whatever the method.")
    low: float | None = Field(None, ge=0, description="band, icepop: the lower bound; null for 0.5.")
    high: float | None = Field(None, gt=0, description="band, icepop: the upper bound; null for 2 (band) or 5 (icepop).")
    phi: float = Field(0.75, gt=0, description="kpop: the largest binary KL, in nats, either way.")
    sequence: Literal["none", "seq_tis", "seq_mis"] = Field(
        "none",
        description=(
            "A weight of the whole sequence beside the token's, R = prod k. seq_tis: min(R, sequence_cap)."
            " seq_mis: R if R <= sequence_cap, else 0."
        ),
    )
    sequence_cap: float = Field(2.0, gt=0, description="seq_tis, seq_mis: the largest sequence weight.")
    length_normalised: bool = Field(
        False,
        description="seq_tis, seq_mis: R = (prod k)^(1/T). The product shrinks long healthy sequences: 0.06 at 8,000 tokens.",
    )
    reject: list[RejectionRule] = Field(
        [],
        description="Rules that drop tokens or sequences: k1, k2, k3, geo_rs, veto, with changes {rule: k3, high: 0.01}, or their keys.",
    )

    @model_validator(mode="before")
    @classmethod
    def _expand_preset(cls, given: Any) -> Any:
        return expand_preset(given) if isinstance(given, dict) else given

    @field_validator("lam", mode="before")
    @classmethod
    def _lam_is_a_number_or_auto(cls, lam: Any) -> Any:
        if lam != "auto" and not isinstance(lam, (int, float)):
            raise ValueError(f"lam = {lam!r} is neither a number nor 'auto'")
        if lam != "auto" and lam < 0:
            raise ValueError(f"lam = {lam:g} is negative; a cap of 1 + lam * (1 - p) needs lam >= 0, or 'auto'")
        return lam

    @model_validator(mode="after")
    def _parts_agree(self) -> Method:
        if self.method in SEQUENCE_METHODS and self.sequence not in ("none", self.method):
            raise ValueError(f"method = '{self.method}' and sequence = '{self.sequence}' are two sequence weights; set one of them")
        low, high = self.bounds
        if self.method in DEFAULT_BOUNDS and low > high:
            raise ValueError(f"low = {low:g} is above high = {high:g}; {self.method} would keep nothing")
        names = [rule.name for rule in self.reject]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"reject holds two rules on {twice}; give one rule both bounds")
        return self

    @property
    def token_method(self) -> str:
        """The name of the token weight; ``none`` for a method that is a sequence weight alone."""
        return "none" if self.method in SEQUENCE_METHODS else self.method

    @property
    def sequence_method(self) -> str:
        """The name of the sequence weight, or ``none``."""
        return self.method if self.method in SEQUENCE_METHODS else self.sequence

    @property
    def has_weight(self) -> bool:
        """Whether any token can get a weight other than 1 and 0 by rejection."""
        return (self.token_method, self.sequence_method) != ("none", "none")

    @property
    def bounds(self) -> tuple[float, float]:
        """(low, high) of band and icepop, with the method's own defaults."""
        low, high = DEFAULT_BOUNDS.get(self.method, DEFAULT_BOUNDS["band"])
        return (low if self.low is None else self.low), (high if self.high is None else self.high)

    @property
    def lam_value(self) -> float:
        """lam as a number. ``auto`` has none until it is chosen, see :class:`megatron_tim.correction.lam.AutoLam`."""
        if self.lam == "auto":
            raise ValueError("lam = 'auto' is not a number yet; pass correct() the configuration of AutoLam.resolve(config).")
        return self.lam


class CorrectionConfig(Method):
    """The correction of a run: its method, when the weights are formed, and what is measured beside it.

    Raises:
        ValueError: (pydantic's ValidationError) an unknown key, a value outside its range, or keys that contradict each other.
    """

    mode: Literal["recompute", "bypass"] = Field(
        "recompute",
        description=(
            "recompute: a forward pass before the first minibatch gives the old policy's log-probs, the ratio is r = pi_theta / pi_old"
            " and the weights are fixed for the rollout batch. bypass: no such pass, pi_old is the rollout policy; losses that clip r"
            " then take no weight, since r holds the mismatch, and reinforce and cispo form theirs from the current policy in each"
            " micro-batch."
        ),
    )
    shadows: dict[str, Method] = Field(
        {},
        description="Methods measured beside the active one, by name: a list of presets, or NAME: {method: tis, cap: 1.5}.",
    )
    diagnostics: bool = Field(True, description="Measure the displacement and the method's bias and variance by confidence too.")
    displacement_cut: float = Field(
        1e-7, ge=0, lt=0.5, description="Displacements where 1 - p or 1 - q is below this are rounding, left out and counted."
    )
    auto_lam: AutoLamConfig = Field(
        AutoLamConfig(), description="How lam = auto is chosen; `measure` alone logs the lam that would be best."
    )

    @field_validator("shadows", mode="before")
    @classmethod
    def _names_are_presets(cls, given: Any) -> Any:
        if not isinstance(given, list):
            return given
        if wrong := [name for name in given if not isinstance(name, str)]:
            raise ValueError(f"{wrong[0]!r} is no preset's name; a list holds presets, other methods need a name: NAME: {{method: tis}}")
        return {name: {"preset": name} for name in given}

    @field_validator("shadows")
    @classmethod
    def _shadows_have_a_number(cls, shadows: dict[str, Method]) -> dict[str, Method]:
        for name, method in shadows.items():
            if not name or "/" in name:
                raise ValueError(f"'{name}' is no name for a shadow: it becomes part of a metric's name, so it needs a letter and no '/'")
            if method.lam == "auto":
                raise ValueError(f"{name}: lam = 'auto' is chosen for the active method alone; give the shadow a number")
        return shadows


def check_combination(correction: CorrectionConfig, loss: LossConfig) -> None:
    """Refuses a method that the mode and the loss would leave without effect.

    Raises:
        ValueError: names the keys and what to change.
    """
    if correction.mode == "bypass" and loss.clips_ratio and correction.has_weight:
        raise ValueError(
            f"correction.method = '{correction.method}' has no effect with correction.mode = 'bypass' and loss.name = '{loss.name}',"
            " whose ratio pi_theta / pi_rollout already holds the mismatch; set correction.method=none (rejection rules may stay), or"
            " loss.name=reinforce, or correction.mode=recompute."
        )
    if correction.mode == "bypass" and correction.lam == "auto":
        raise ValueError(
            "correction.lam = 'auto' needs correction.mode = 'recompute', which measures the whole rollout batch before its first"
            " minibatch; set it, or give correction.lam a number."
        )
