"""Fixtures of several tests."""

import pytest


@pytest.fixture
def unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router does not look at engines that it uses: it learns of their state by requests."""
    monkeypatch.setattr("kv_connector.router.engines.members.Members.to_watch", lambda _: [])
