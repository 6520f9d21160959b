"""Removes from a failing scenario everything that the failure does not need, and reports the rest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, replace
from itertools import chain
from typing import Any

from .campaign import DRAWS, Scenario, run

_LINES = 80  # lines of a trace
_EVENTS = ("faults", "ambushes", "plans", "trainers")  # events that may be left out of a scenario
_KEPT = ("seed", "prefills", "decodes", "both")


def minimize(scenario: Scenario) -> Scenario:
    """Returns a scenario that still fails, while none of its simpler neighbours does."""
    while True:
        simpler = next((s for s in _simpler(scenario) if run(s)[1] is not None), None)
        if simpler is None:
            return scenario
        scenario = simpler


def report(of: str, seed: int) -> str:
    """Returns the minimal trace of a failing seed, and the command that repeats it."""
    smallest = minimize(DRAWS[of](seed))
    world, violation = run(smallest, tracing=True)
    trace = world.books.trace
    cut = [f"  ... {len(trace) - _LINES} lines before"] if len(trace) > _LINES else []
    return "\n".join(
        [
            f"seed {seed}: {violation}",
            "the smallest scenario that still fails:",
            *(f"  {line}" for line in _told(smallest)),
            "what happens in it:",
            *cut,
            *(f"  {line:.240}" for line in trace[-_LINES:]),
            f"replay: python -m tests.simulation --of {of} --seed {seed}",
        ]
    )


def _simpler(scenario: Any) -> Iterator[Any]:
    """Yields simpler scenarios: first with an event left out, then with a plainer value."""
    several = [f.name for f in fields(scenario) if isinstance(getattr(scenario, f.name), tuple)]
    for name in several:
        items = getattr(scenario, name)
        for index in range(len(items) if name in _EVENTS else 0):
            yield replace(scenario, **{name: items[:index] + items[index + 1 :]})
    for field_ in fields(scenario):
        if field_.name not in (*several, *_KEPT):
            yield from _defaulted(scenario, field_)
    for name in several:
        items = getattr(scenario, name)
        for index, item in enumerate(items if name not in ("faults", "ambushes") else ()):
            for field_ in fields(item):
                for plainer in _defaulted(item, field_):
                    yield replace(scenario, **{name: (*items[:index], plainer, *items[index + 1 :])})


def _defaulted(thing: Any, field_: Field[Any]) -> Iterator[Any]:
    if field_.default is not MISSING and getattr(thing, field_.name) != field_.default:
        yield replace(thing, **{field_.name: field_.default})


def _told(scenario: Any) -> Iterator[str]:
    events = {f.name: getattr(scenario, f.name) for f in fields(scenario) if f.name in _EVENTS}
    yield _without_defaults(replace(scenario, **dict.fromkeys(events, ())))
    yield from map(_without_defaults, chain.from_iterable(events.values()))


def _without_defaults(thing: Any) -> str:
    shown = [
        f"{f.name}={round(value, 4) if isinstance(value, float) else value!r}"
        for f in fields(thing)
        if (value := getattr(thing, f.name)) != f.default
    ]
    return f"{type(thing).__name__}({', '.join(shown)})"
