"""Names of the metrics that people see of a run: written by the training loop, read by the console and the report."""

REWARD = "reward_mean"
KL = "rollout_corr/kl"
MAX_RATIO = "rollout_corr/rollout_is_max"
LAM = "rollout_corr/lam"
CAPPED_SHARE = "rollout_corr/capped_share"
GRAD_NORM = "grad_norm"
TOKENS_PER_S = "tokens_per_s"
EXACT_MATCH = "eval/exact_match"
PHASES = ("rollout", "score", "train", "sync")
"""The parts of a step, in their order; the rest of a step's time is small work between them."""
STEP_SECONDS = "seconds/step"


def phase_seconds(phase: str) -> str:
    """The metric with the seconds of a phase."""
    return f"seconds/{phase}"


PREFLIGHT = "preflight/"
"""Prefix of what the preflight measured."""
