"""Board and rules, read by Prometheus: `make test-observability`. `make test` only reads the files."""

from __future__ import annotations

import os
import sys
from pathlib import Path

FILES = Path(__file__).parents[2] / "integration" / "observability"
sys.path.append(str(FILES))

if "KVC_PROMETHEUS" not in os.environ:
    collect_ignore = ["test_board.py", "test_prometheus.py"]
