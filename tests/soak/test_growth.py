"""The verdict of the soak on series with and without a leak."""

from __future__ import annotations

import random

import pytest

from tests.soak.growth import FEWEST_SAMPLES, Trend, longest_life, trend

MIB = float(1 << 20)
REQUESTS = [20.0 * number for number in range(180)]  # half an hour at 2 a second


def fitted(values: list[float], resolution: float = MIB) -> Trend:
    found = trend(REQUESTS, values, resolution)
    assert found is not None
    return found


def walk(seed: int, step: float) -> list[float]:
    """Memory that moves in steps up and down around its mean, and forgets them within a minute."""
    rng, value, values = random.Random(seed), 0.0, []
    for _ in REQUESTS:
        value = 0.8 * value + rng.gauss(0, step)
        values.append(200 * MIB + value)
    return values


def test_trend_is_flat_when_memory_only_fluctuates() -> None:
    assert sum(fitted(walk(seed, 4 * MIB)).grows for seed in range(300)) <= 3


@pytest.mark.parametrize("bytes_per_request", [2048, 8192])
def test_trend_grows_when_each_request_leaks(bytes_per_request: int) -> None:
    values = [
        value + bytes_per_request * requests
        for value, requests in zip(walk(1, 0.2 * MIB), REQUESTS, strict=True)
    ]
    found = fitted(values)
    assert found.grows
    assert found.per_million == pytest.approx(bytes_per_request * 1e6, rel=0.15)
    assert abs(found.per_million - bytes_per_request * 1e6) < 4 * found.error


def test_trend_grows_when_each_fault_leaks_a_descriptor() -> None:
    """One descriptor for each restarted engine, every five minutes."""
    assert fitted([40.0 + number // 30 for number in range(180)], resolution=2).grows


def test_trend_is_flat_when_the_heap_grows_once() -> None:
    assert not fitted([200 * MIB + (6 * MIB if number > 60 else 0) for number in range(180)]).grows


@pytest.mark.parametrize("filled", [70, 100])
def test_trend_is_flat_when_a_cache_fills_up(filled: int) -> None:
    assert not fitted([200 * MIB + min(number, filled) * 0.2 * MIB for number in range(180)]).grows


def test_trend_is_flat_below_its_resolution() -> None:
    assert not fitted([200 * MIB + number * 100 for number in range(180)]).grows


def test_trend_is_unknown_when_samples_are_few() -> None:
    few = FEWEST_SAMPLES - 1
    assert trend(REQUESTS[:few], [1.0] * few, 0) is None
    assert trend([5.0] * FEWEST_SAMPLES, [1.0] * FEWEST_SAMPLES, 0) is None


def test_longest_life_skips_shorter_lives_of_a_restarted_process() -> None:
    assert longest_life([1, 2, 2, 2, 3, 3]) == slice(1, 4)
    assert longest_life([]) == slice(0, 0)
