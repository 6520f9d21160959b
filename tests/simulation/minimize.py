"""Takes everything out of a failing scenario that the failure does not need, and tells the rest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, replace
from typing import Any

from .campaign import run
from .scenario import Fault, Plan, Scenario
from .shape import Side

_LINES = 80  # of a trace


def minimize(scenario: Scenario) -> Scenario:
    """A scenario that still fails, and none of whose simpler neighbours does."""
    while True:
        simpler = next((s for s in _simpler(scenario) if run(s)[1] is not None), None)
        if simpler is None:
            return scenario
        scenario = simpler


def report(seed: int, scenario: Scenario) -> str:
    """The minimal trace of a failing seed, and how to see it again."""
    smallest = minimize(scenario)
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
            f"replay: python -m tests.simulation --seed {seed}",
        ]
    )


def _simpler(scenario: Scenario) -> Iterator[Scenario]:
    """First by leaving something out, then by making something plain."""
    for name in ("faults", "plans"):
        items = getattr(scenario, name)
        for index in range(len(items)):
            yield replace(scenario, **{name: items[:index] + items[index + 1 :]})
    for field_ in fields(Scenario):
        if field_.name in ("chaos", "lease", "skew", "jitter", "wire", "step", "heads"):
            yield from _defaulted(scenario, field_)
    for name, kind in (("sides", Side), ("plans", Plan)):
        items = getattr(scenario, name)
        for index, item in enumerate(items):
            for field_ in fields(kind):
                for plainer in _defaulted(item, field_):
                    yield replace(scenario, **{name: (*items[:index], plainer, *items[index + 1 :])})


def _defaulted(thing: Any, field_: Field[Any]) -> Iterator[Any]:
    if field_.default is not MISSING and getattr(thing, field_.name) != field_.default:
        yield replace(thing, **{field_.name: field_.default})


def _told(scenario: Scenario) -> Iterator[str]:
    yield _without_defaults(replace(scenario, plans=(), faults=()))
    yield from map(_without_defaults, (*scenario.plans, *scenario.faults))


def _without_defaults(thing: Scenario | Plan | Fault) -> str:
    shown = [
        f"{f.name}={round(value, 4) if isinstance(value, float) else value!r}"
        for f in fields(thing)
        if (value := getattr(thing, f.name)) != f.default
    ]
    return f"{type(thing).__name__}({', '.join(shown)})"
