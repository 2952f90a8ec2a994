"""Named corrections: the methods of the papers and their ablations, each as the keys that make it."""

from __future__ import annotations

from typing import Any

from megatron_tim.correction.rejection import RejectionRule

PRESETS: dict[str, dict[str, Any]] = {
    "none": {"method": "none"},
    "exact": {"method": "exact"},
    "tis": {"method": "tis"},
    "tis_1_13": {"method": "tis", "cap": 1.13},
    "cis": {"method": "cis"},
    "cis_kappa_0_1": {"method": "cis", "kappa": 0.1},
    "cis_kappa_0": {"method": "cis", "kappa": 0.0},
    "band": {"method": "band"},
    "icepop": {"method": "icepop"},
    "kpop": {"method": "kpop"},
    "seq_tis": {"method": "none", "sequence": "seq_tis"},
    "seq_mis": {"method": "none", "sequence": "seq_mis"},
    "geo_rs": {"method": "none", "reject": ["geo_rs"]},
    # Token truncation beside sequence rejection, closest to the zero-mismatch reference (VeXact, arXiv 2605.14220, section 4.2).
    "vexact_token_seq": {"method": "tis", "cap": 2.0, "reject": ["k3"]},
}


def expand_preset(given: dict[str, Any]) -> dict[str, Any]:
    """The keys of ``given['preset']`` beside the others; a key of the preset cannot be given another value.

    Raises:
        ValueError: an unknown preset, or a key that contradicts it.
    """
    name = given.get("preset")
    if name is None:
        return given
    if name not in PRESETS:
        raise ValueError(f"'{name}' is no preset; allowed: {', '.join(PRESETS)}")
    keys = PRESETS[name]
    for key, value in keys.items():
        if key in given and not _same(key, given[key], value):
            raise ValueError(f"preset '{name}' sets {key} = {value!r}, but {key} = {given[key]!r} is given too; remove one of them")
    return given | keys


def _same(key: str, given: Any, value: Any) -> bool:
    """Whether a key says what the preset says; rules are compared in full, as a saved configuration holds them."""
    if key != "reject":
        return given == value
    return [RejectionRule.model_validate(rule) for rule in given] == [RejectionRule.model_validate(rule) for rule in value]
