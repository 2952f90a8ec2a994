"""Corrections for the training-inference mismatch: tensors in, tensors out; needs torch and pydantic alone."""

from megatron_tim.correction.config import CorrectionConfig, LossConfig

__all__ = ["CorrectionConfig", "LossConfig"]
