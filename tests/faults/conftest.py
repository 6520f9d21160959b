"""Collects the fault tests in `make test-faults` only: they take minutes each, and need a machine to
themselves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

if "KVC_FAULT_MINUTES" not in os.environ:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from deployment import make_small_llama

    return make_small_llama(tmp_path_factory.mktemp("model") / "llama")
