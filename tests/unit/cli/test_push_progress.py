"""Progress of a weight push, as shown at a terminal and in a log."""

from __future__ import annotations

import io

from rich.console import Console

from kv_connector.cli.common.push_progress import push_progress


def shown(*, terminal: bool) -> str:
    written = {"10.0.0.5:5800": 0, "10.0.0.6:5800": 0}
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=100)
    with push_progress(lambda: {engine: (done, 2_000_000) for engine, done in written.items()}, console):
        written["10.0.0.5:5800"] = 2_000_000
        written["10.0.0.6:5800"] = 500_000
    return file.getvalue()


def test_a_terminal_has_a_bar_for_each_engine() -> None:
    last = shown(terminal=True).rpartition("10.0.0.5:5800")[2].splitlines()
    assert "2.0/2.0 MB" in last[0]
    assert "10.0.0.6:5800" in last[1]
    assert "0.5/2.0 MB" in last[1]


def test_a_log_has_none() -> None:
    assert shown(terminal=False) == ""
