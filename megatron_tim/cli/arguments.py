"""Argument types that several subcommands share."""

from __future__ import annotations

import argparse


def positive_int(text: str) -> int:
    """A whole number of at least 1; argparse turns the refusal into its one-line error."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return number
