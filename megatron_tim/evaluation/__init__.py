"""Benchmarks and the verifiers that decide whether a response is right."""
