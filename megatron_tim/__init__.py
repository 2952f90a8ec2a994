"""Measure and correct the training-inference mismatch of mixture-of-experts RL on Megatron-Core."""

__version__ = "0.1.0"
