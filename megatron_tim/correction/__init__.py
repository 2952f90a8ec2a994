"""Corrections for the training-inference mismatch: tensors in, tensors out; needs torch, numpy and pydantic alone."""

from megatron_tim.correction.advantages import (
    AdvantageConfig,
    advantages,
    group_mean,
    group_mean_std,
    leave_one_out,
    reinforce_plus_plus,
    whiten,
)
from megatron_tim.correction.aggregation import denominator_parts, token_coefficients
from megatron_tim.correction.config import CorrectionConfig, Method, check_combination
from megatron_tim.correction.correct import Correction, correct
from megatron_tim.correction.displacement import displacement, log_odds, mismatch_ratio
from megatron_tim.correction.lam import AutoLam, AutoLamConfig
from megatron_tim.correction.loss_config import LossConfig
from megatron_tim.correction.losses import policy_loss, reference_kl
from megatron_tim.correction.metrics import summarise
from megatron_tim.correction.objective import token_objective
from megatron_tim.correction.objective_metrics import objective_metrics
from megatron_tim.correction.presets import PRESETS
from megatron_tim.correction.rejection import RejectionRule
from megatron_tim.correction.settings import Settings
from megatron_tim.correction.sums import MetricSums

__all__ = [
    "PRESETS",
    "AdvantageConfig",
    "AutoLam",
    "AutoLamConfig",
    "Correction",
    "CorrectionConfig",
    "LossConfig",
    "Method",
    "MetricSums",
    "RejectionRule",
    "Settings",
    "advantages",
    "check_combination",
    "correct",
    "denominator_parts",
    "displacement",
    "group_mean",
    "group_mean_std",
    "leave_one_out",
    "log_odds",
    "mismatch_ratio",
    "objective_metrics",
    "policy_loss",
    "reference_kl",
    "reinforce_plus_plus",
    "summarise",
    "token_coefficients",
    "token_objective",
    "whiten",
]
