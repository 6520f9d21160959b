"""Fixtures of several tests."""

import pytest


@pytest.fixture
def unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns off health checks of engines that are in use: the router learns their state only from
    requests."""
    monkeypatch.setattr("kv_connector.router.engines.members.Members.to_watch", lambda _: [])
