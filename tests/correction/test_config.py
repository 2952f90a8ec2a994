import math

import pytest

from megatron_tim.correction import (
    PRESETS,
    AdvantageConfig,
    AutoLamConfig,
    CorrectionConfig,
    LossConfig,
    Method,
    RejectionRule,
    check_combination,
)

SECTIONS = (CorrectionConfig, LossConfig, AutoLamConfig, AdvantageConfig, RejectionRule)


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
    config = CorrectionConfig()
    assert (config.method, config.lam, config.kappa, config.cap, config.phi, config.mode) == ("cis", 2.3, 5e-3, 2.0, 0.75, "recompute")
    assert (config.sequence, config.sequence_cap, config.reject, config.shadows) == ("none", 2.0, [], {})
    assert Method(method="icepop").bounds == (0.5, 5) and Method(method="band").bounds == (0.5, 2)
    clips = {name: LossConfig(name=name).clips for name in ("reinforce", "ppo", "gspo", "cispo")}
    assert clips == {"reinforce": (None, None), "ppo": (0.2, 0.28), "gspo": (3e-4, 4e-4), "cispo": (None, 4.0)}
    loss = LossConfig()
    assert (loss.name, loss.aggregation, loss.dual_clip, loss.kl_coeff, loss.entropy_coeff) == ("reinforce", "token_mean", None, 0, 0)
    assert not loss.shrink_after_rejection


@pytest.mark.parametrize("section", SECTIONS)
def test_every_field_is_documented(section: type) -> None:
    assert all(field.description for field in section.model_fields.values())


@pytest.mark.parametrize("mode", ["recompute", "bypass"])
@pytest.mark.parametrize("method", ["none", "tis", "cis", "seq_mis"])
@pytest.mark.parametrize("loss", ["reinforce", "ppo", "gspo", "cispo"])
def test_only_a_weight_on_a_clipped_bypass_ratio_is_refused(mode: str, method: str, loss: str) -> None:
    pair = CorrectionConfig(mode=mode, method=method), LossConfig(name=loss)
    if mode == "bypass" and loss in ("ppo", "gspo") and method != "none":
        with pytest.raises(ValueError, match=f"correction.method = '{method}' has no effect"):
            check_combination(*pair)
    else:
        check_combination(*pair)


def test_rejection_is_allowed_on_a_bypass_ratio() -> None:
    check_combination(CorrectionConfig(mode="bypass", method="none", reject=["k3"]), LossConfig(name="ppo"))


def test_auto_lam_needs_the_whole_rollout_batch() -> None:
    check_combination(CorrectionConfig(lam="auto"), LossConfig())
    with pytest.raises(ValueError, match="correction.lam = 'auto' needs correction.mode = 'recompute'"):
        check_combination(CorrectionConfig(lam="auto", mode="bypass"), LossConfig())
    with pytest.raises(ValueError, match="lam = 'auto' is not a number yet; pass correct.. the configuration of AutoLam.resolve"):
        _ = CorrectionConfig(lam="auto").lam_value


@pytest.mark.parametrize(
    ("section", "keys", "sentence"),
    [
        (Method, {"method": "icepop", "low": 6.0}, "low = 6 is above high = 5; icepop would keep nothing"),
        (Method, {"method": "band", "high": 0.1}, "low = 0.5 is above high = 0.1; band would keep nothing"),
        (Method, {"method": "seq_tis", "sequence": "seq_mis"}, "are two sequence weights; set one of them"),
        (Method, {"reject": ["k3", {"rule": "k3", "high": 0.1}]}, "reject holds two rules on k3_sequence_mean; give one rule both bounds"),
        (Method, {"preset": "ciss"}, "'ciss' is no preset; allowed: none, exact, tis"),
        (Method, {"preset": "tis_1_13", "cap": 2.0}, r"preset 'tis_1_13' sets cap = 1.13, but cap = 2.0 is given too"),
        (Method, {"lam": "automatic"}, "lam"),
        (CorrectionConfig, {"shadows": {"a/b": {}}}, "'a/b' is no name for a shadow"),
        (CorrectionConfig, {"shadows": {"": {}}}, "'' is no name for a shadow"),
        (CorrectionConfig, {"shadows": ["nothing"]}, "'nothing' is no preset"),
        (CorrectionConfig, {"shadows": {"x": {"lam": "auto"}}}, "x: lam = 'auto' is chosen for the active method alone"),
        (AutoLamConfig, {"start": 0.05}, "start = 0.05 is not between low = 0.1 and high = 20"),
        (RejectionRule, {"rule": "k4"}, "'k4' is no rejection rule; allowed: k1, k2, k3, geo_rs, veto"),
        (RejectionRule, {"statistic": "k3", "level": "token"}, "the rule k3_token has neither low nor high; give at least one bound"),
        (RejectionRule, {"rule": "k3", "low": 1, "high": 0.5}, "k3_sequence_mean has low = 1 above high = 0.5 and would reject everything"),
        (RejectionRule, {"rule": "k1", "high": -0.5}, "k1_sequence_mean has low = 0.5 above high = -0.5"),
        (RejectionRule, {"rule": "geo_rs", "low": -1, "high": 0}, "has high = 0, but a ratio is above 0: it would reject everything"),
        (LossConfig, {"name": "cispo", "dual_clip": 3.0}, "dual_clip = 3 has no meaning for name = 'cispo', only for ppo and gspo"),
        (LossConfig, {"dual_clip": 1.0}, "dual_clip"),
        (LossConfig, {"length_norm": 9.0}, "length_norm = 9.0 does not fit aggregation = 'token_mean'"),
        (LossConfig, {"aggregation": "sequence_mean_token_sum"}, "length_norm = None does not fit aggregation = 'sequence_mean_token_sum'"),
    ],
)
def test_keys_that_contradict_each_other(section: type, keys: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        section(**keys)


def test_a_preset_may_repeat_what_it_says() -> None:
    """A configuration that was saved with its preset can be read again."""
    for name in PRESETS:
        method = Method(preset=name)
        assert Method(**method.model_dump()) == method


def test_shadows_by_preset_or_by_keys() -> None:
    config = CorrectionConfig(shadows=["tis", "cis_kappa_0_1"])
    assert config.shadows["tis"].method == "tis" and config.shadows["cis_kappa_0_1"].kappa == 0.1
    assert CorrectionConfig(shadows={"mine": {"method": "tis", "cap": 1.5}}).shadows["mine"].cap == 1.5
    assert CorrectionConfig(**config.model_dump()) == config


@pytest.mark.parametrize("value", [True, False])
def test_a_number_is_no_truth_value(value: bool) -> None:
    with pytest.raises(ValueError, match=f"{str(value).lower()} is no value for it; allowed: a number"):
        CorrectionConfig(cap=value)
