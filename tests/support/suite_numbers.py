"""The numbers that a person gives a suite, as a variable of make or as an option of a fuzzer."""

from __future__ import annotations

import argparse
import math
import os

import pytest


def whole(text: str) -> int:
    """Reads a whole number of at least 1. It is a type for argparse."""
    number = int(text) if text.strip().isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return number


def positive(text: str) -> float:
    """Reads a number above 0. It is a type for argparse."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def whole_of(variable: str, default: int) -> int:
    """Returns the whole number in an environment variable. If it is none, pytest shows the error alone."""
    text = os.environ.get(variable)
    if text is None:
        return default
    try:
        return whole(text)
    except argparse.ArgumentTypeError as error:
        raise pytest.Collector.CollectError(f"{variable}: {error}") from None


def positive_of(variable: str, default: float) -> float:
    """Returns the number above 0 in an environment variable. If it is none, pytest shows the error alone."""
    text = os.environ.get(variable)
    if text is None:
        return default
    try:
        return positive(text)
    except argparse.ArgumentTypeError as error:
        raise pytest.Collector.CollectError(f"{variable}: {error}") from None
