"""Explains why two engines cannot share pages, and what to change."""

from __future__ import annotations

from collections.abc import Mapping

from kv_connector.protocol.wire.messages import Fingerprint

SAME_RELEASE = "run the same release of kv-connector on both sides"

_SHOWN = 4  # entries of a list that are shown; of a longer list, only the first difference

_Value = str | tuple[str, ...] | None  # None: that side has no such pair


def mismatch(prefill: Fingerprint, decode: Fingerprint, advice: Mapping[str, str]) -> str | None:
    """One sentence for each pair that differs, in ``prefill``'s order, or None if no pair does.

    ``advice``: the operator's remedy, by the pair's name.
    """
    ours, theirs = ({pair.name: pair.value for pair in side} for side in (prefill, decode))
    problems = []
    for name in ours | theirs:
        if ours.get(name) != theirs.get(name):
            # If one side lacks a pair, its release does not compare that pair.
            known = advice.get(name, SAME_RELEASE) if name in ours and name in theirs else SAME_RELEASE
            problems.append(f"{_difference(name, ours.get(name), theirs.get(name))}: {known}")
    return "; ".join(problems) or None


def _difference(name: str, prefill: _Value, decode: _Value) -> str:
    if isinstance(prefill, tuple) and isinstance(decode, tuple) and len(prefill) == len(decode) > _SHOWN:
        index = next(i for i, (a, b) in enumerate(zip(prefill, decode, strict=True)) if a != b)
        return _difference(f"{name}[{index}]", prefill[index], decode[index])
    return f"{name}: prefill engine has {_shown(prefill)}, decode engine has {_shown(decode)}"


def _shown(value: _Value) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, str):
        return value
    return f"{len(value)} entries" if len(value) > _SHOWN else f"({', '.join(value)})"
