"""Routing replay: the experts that the rollout chose, and their way into the trainer's routers."""
