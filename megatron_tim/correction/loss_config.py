"""What a policy loss can be told; every value is checked when the object is made."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from megatron_tim.correction.settings import Settings

# How far r may go below and above 1 before a loss clips it; None where that side has no bound.
DEFAULT_CLIPS: dict[str, tuple[float | None, float | None]] = {
    "reinforce": (None, None),
    "ppo": (0.2, 0.28),
    "gspo": (3e-4, 4e-4),
    "cispo": (None, 4.0),
}


class LossConfig(Settings):
    """The policy loss, and the terms beside it.

    Raises:
        ValueError: (pydantic's ValidationError) an unknown key, or a value outside its range; both are named.
    """

    name: Literal["reinforce", "ppo", "gspo", "cispo"] = Field(
        "reinforce",
        description=(
            "w: the correction's weight. reinforce: -A w log pi. ppo: -w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)."
            " gspo: ppo with the geometric mean of r over the sequence as every token's r."
            " cispo: -A w sg(min(r, 1 + clip_high)) log pi."
        ),
    )
    clip_low: float | None = Field(
        None, ge=0, le=1, description="r is clipped below at 1 - clip_low; null: 0.2 (ppo), 3e-4 (gspo), no bound (cispo)."
    )
    clip_high: float | None = Field(
        None, ge=0, description="r is clipped above at 1 + clip_high; null: 0.28 (ppo), 4e-4 (gspo), 4 (cispo)."
    )
    dual_clip: float | None = Field(
        None, gt=1, description="ppo, gspo: where A < 0, the loss is at most -dual_clip * A (3 is usual); null for none."
    )
    aggregation: Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum"] = Field(
        "token_mean",
        description=(
            "token_mean: every token counts the same. sequence_mean_token_mean: every sequence counts the same (GRPO)."
            " sequence_mean_token_sum: the sum over a sequence divided by length_norm (Dr. GRPO)."
        ),
    )
    length_norm: float | None = Field(
        None, gt=0, description="sequence_mean_token_sum: the fixed length each sequence's sum is divided by, e.g. the longest response."
    )
    shrink_after_rejection: bool = Field(
        False, description="Take rejected and dropped tokens out of the denominator too; otherwise it is fixed before."
    )
    kl_coeff: float = Field(0.0, ge=0, description="Weight of the KL to the reference policy, added to the loss, never corrected.")
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        "k3", description="Per token, s = log pi - log pi_ref. k1: s. k2: s^2 / 2. k3: e^-s - 1 + s. Only k2 has the KL's own gradient."
    )
    entropy_coeff: float = Field(0.0, ge=0, description="Entropy bonus: entropy_coeff * entropy is subtracted from the loss, unweighted.")

    @model_validator(mode="after")
    def _parts_agree(self) -> LossConfig:
        if self.dual_clip is not None and self.name not in ("ppo", "gspo"):
            raise ValueError(f"dual_clip = {self.dual_clip:g} has no meaning for name = '{self.name}', only for ppo and gspo")
        if (self.aggregation == "sequence_mean_token_sum") != (self.length_norm is not None):
            raise ValueError(
                f"length_norm = {self.length_norm} does not fit aggregation = '{self.aggregation}':"
                " sequence_mean_token_sum needs a number there, the others need null"
            )
        return self

    @property
    def clips_ratio(self) -> bool:
        """Whether the gradient goes through a clipped r, which in bypass mode holds the mismatch itself."""
        return self.name in ("ppo", "gspo")

    @property
    def clips(self) -> tuple[float | None, float | None]:
        """(clip_low, clip_high) with the loss's own defaults."""
        low, high = DEFAULT_CLIPS[self.name]
        return (low if self.clip_low is None else self.clip_low), (high if self.clip_high is None else self.clip_high)
