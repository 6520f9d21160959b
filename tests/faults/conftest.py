"""Faults are injected by `make test-faults` only: they take minutes each, and want a machine of their own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

if "KVC_FAULT_MINUTES" not in os.environ:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from deployment import LLAMA

    from kv_connector.lab.model import make_llama

    return make_llama(
        tmp_path_factory.mktemp("model") / "llama",
        layers=LLAMA.layers,
        hidden=128,
        heads=4,
        kv_heads=2,
        head_dim=32,
        intermediate=256,
    )
