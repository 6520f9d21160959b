"""How many examples the expensive Hypothesis properties try: all in `make test`, a sample in `make check`.

KVC_SAMPLE=8 tries one example in eight. All examples of tests/unit/protocol take 14 s of a core
(2026-11-29, the time of three tests in a process of their own).
"""

from __future__ import annotations

from suite_numbers import whole_of

ONE_IN = whole_of("KVC_SAMPLE", 1)


def sample(examples: int) -> int:
    """The number of examples to try, where a whole run tries this many."""
    return -(-examples // ONE_IN)
