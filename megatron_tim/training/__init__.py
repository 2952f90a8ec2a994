"""The algorithm: sample, reward, advantage, correct, step, sync; and what people see of a run."""
