"""Lists all model classes of the installed framework: their KV cache, and whether kv-connector transfers it.

    python scripts/models.py                 # each class on one line
    python scripts/models.py --record        # writes docs/data/models/NAME.json
    python scripts/models.py --check         # fails if a class is unknown, or the record is stale

The Python that runs it decides which framework is listed: vLLM, or SGLang where no vLLM is installed. `make
reference` makes the tables of docs/models.md from the records.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
DATA = ROOT / "docs" / "data" / "models"


class Row(NamedTuple):
    """One model class."""

    name: str
    """Architecture, as config.json has it."""
    caches: tuple[str, ...]
    """Kinds of its KV cache: specs and layers with states in vLLM, pools in SGLang."""
    verdict: str
    """"supported", "refused", "not run", "no KV cache" or "unknown"."""
    reason: str
    """Names of tests, or why not."""


def rows() -> tuple[str, list[Row]]:
    """Returns the name of the framework with its release, and a row for each of its model classes."""
    if importlib.util.find_spec("vllm") is not None:
        import models_of_vllm

        return models_of_vllm.NAME, models_of_vllm.vllm_rows()
    import models_of_sglang

    return models_of_sglang.NAME, models_of_sglang.sglang_rows()


def record(found: Iterable[Row]) -> str:
    """Returns the rows as JSON: classes with the same caches and verdict together."""
    families: dict[tuple[tuple[str, ...], str, str], list[str]] = {}
    for row in found:
        families.setdefault((row.caches, row.verdict, row.reason), []).append(row.name)
    ordered = sorted(families.items(), key=lambda family: (family[0][1], -len(family[1]), family[0][0]))
    lines = [
        json.dumps({"caches": caches, "verdict": verdict, "reason": reason, "models": sorted(names)})
        for (caches, verdict, reason), names in ordered
    ]
    return "[\n" + ",\n".join(lines) + "\n]\n"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Lists model classes and whether their KV is transferred.")
    parser.add_argument("--record", action="store_true", help="Write the record in docs/data.")
    parser.add_argument(
        "--check", action="store_true", help="Fail if a class is unknown or the record is stale."
    )
    options = parser.parse_args(arguments)
    name, found = rows()
    file = DATA / f"{name}.json"
    if options.record:
        file.write_text(record(found))
    elif not options.check:
        for row in found:
            sys.stdout.write(f"{row.name:55} {row.verdict:12} {row.reason}; {', '.join(row.caches)}\n")
    unknown = [row.name for row in found if row.verdict == "unknown"]
    if unknown:
        sys.stderr.write(f"unknown model classes of {name}: {', '.join(unknown)}\n")
    stale = options.check and (not file.is_file() or file.read_text() != record(found))
    if stale:
        sys.stderr.write(f"{file.relative_to(ROOT)} is stale: python scripts/models.py --record\n")
    return 1 if unknown or stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
