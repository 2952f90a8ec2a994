import math

import pytest

from megatron_tim.correction import CorrectionConfig, LossConfig, check_combination

SECTIONS = (CorrectionConfig, LossConfig)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        (CorrectionConfig, "method", "ciss"),
        (CorrectionConfig, "lam", -0.1),
        (CorrectionConfig, "lam", math.nan),
        (CorrectionConfig, "lam", math.inf),
        (CorrectionConfig, "kappa", -1e-9),
        (CorrectionConfig, "kappa", 1.1),
        (CorrectionConfig, "cap", 0.0),
        (CorrectionConfig, "mode", "both"),
        (CorrectionConfig, "lamda", 2.3),
        (LossConfig, "name", "grpo"),
        (LossConfig, "clip_low", -0.1),
        (LossConfig, "clip_low", 1.1),
        (LossConfig, "clip_high", -0.1),
        (LossConfig, "entropy_coeff", -1.0),
        (LossConfig, "clip", 0.2),
    ],
)
def test_wrong_values_are_refused_by_name(section: type, key: str, value: object) -> None:
    with pytest.raises(ValueError, match=key) as refusal:
        section(**{key: value})
    assert repr(value) in str(refusal.value)
    if key in section.model_fields:
        with pytest.raises(ValueError, match=key):
            setattr(section(), key, value)


def test_defaults_are_the_papers() -> None:
    assert CorrectionConfig().model_dump() == {"method": "cis", "lam": 2.3, "kappa": 5e-3, "cap": 2.0, "mode": "recompute"}
    assert LossConfig().model_dump() == {"name": "reinforce", "clip_low": 0.2, "clip_high": 0.28, "entropy_coeff": 0.0}


@pytest.mark.parametrize("section", SECTIONS)
def test_every_field_is_documented(section: type) -> None:
    assert all(field.description for field in section.model_fields.values())


@pytest.mark.parametrize("mode", ["recompute", "bypass"])
@pytest.mark.parametrize("method", ["none", "tis", "cis"])
@pytest.mark.parametrize("loss", ["reinforce", "ppo"])
def test_only_a_weight_on_a_bypass_ppo_ratio_is_refused(mode: str, method: str, loss: str) -> None:
    pair = CorrectionConfig(mode=mode, method=method), LossConfig(name=loss)
    if mode == "bypass" and loss == "ppo" and method != "none":
        with pytest.raises(ValueError, match=f"correction.method = '{method}' has no effect"):
            check_combination(*pair)
    else:
        check_combination(*pair)
