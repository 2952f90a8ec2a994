"""Measurements of the mismatch, and reports that people can look at."""
