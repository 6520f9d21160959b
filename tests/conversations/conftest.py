"""Collects the conversations in `make test-conversations` only: they take minutes, with six processes of
vLLM."""

from __future__ import annotations

import os

if "KVC_CONVERSATIONS" not in os.environ:
    collect_ignore_glob = ["test_*.py"]
