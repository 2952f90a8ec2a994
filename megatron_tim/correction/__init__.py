"""Corrections for the training-inference mismatch: tensors in, tensors out; needs torch and pydantic alone."""

from megatron_tim.correction.advantages import ADVANTAGES, group_mean, group_mean_std
from megatron_tim.correction.config import CorrectionConfig, LossConfig, Settings, check_combination
from megatron_tim.correction.correct import Correction, correct
from megatron_tim.correction.displacement import displacement, log_odds, mismatch_ratio
from megatron_tim.correction.losses import policy_loss
from megatron_tim.correction.metrics import summarise
from megatron_tim.correction.objective import token_objective
from megatron_tim.correction.objective_metrics import objective_metrics
from megatron_tim.correction.sums import MetricSums

__all__ = [
    "ADVANTAGES",
    "Correction",
    "CorrectionConfig",
    "LossConfig",
    "MetricSums",
    "Settings",
    "check_combination",
    "correct",
    "displacement",
    "group_mean",
    "group_mean_std",
    "log_odds",
    "mismatch_ratio",
    "objective_metrics",
    "policy_loss",
    "summarise",
    "token_objective",
]
