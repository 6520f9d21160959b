"""Engines that borrow no prefixes, and the reason that a request gets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kv_connector.protocol.wire.messages import Role
from kv_connector.vllm.connector import _no_prefixes


def config(*, workers: int = 1, caching: bool = True, batches: int = 1) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(world_size=workers),
        cache_config=SimpleNamespace(enable_prefix_caching=caching),
        max_concurrent_batches=batches,
    )


@pytest.mark.parametrize(
    ("given", "role", "reason"),
    [
        ({}, Role.PREFILL, ""),
        ({"batches": 2}, Role.DECODE, ""),
        ({"workers": 2}, Role.PREFILL, ""),
        ({"workers": 2}, Role.DECODE, ""),
        ({"caching": False}, Role.DECODE, "--enable-prefix-caching"),
        ({"batches": 2}, Role.PREFILL, "kv_role kv_both"),
    ],
)
def test_reason_against_borrowing(given: dict[str, Any], role: Role, reason: str) -> None:
    found = _no_prefixes(config(**given), role)
    assert reason in found
    assert bool(found) == bool(reason)
