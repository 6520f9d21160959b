"""Engines that are listed under another URL than they register."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import pytest

from kv_connector.control.membership import Register
from kv_connector.protocol.wire.messages import Role
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.incidents import Incidents
from kv_connector.router.engines.members import Members, Side
from kv_connector.router.engines.pool import Pool
from kv_connector.router.front.aliases import Aliases

pytestmark = pytest.mark.anyio

NAMES = {"engine-0": ["10.0.0.1"], "10.0.0.1": ["10.0.0.1"], "10.0.0.2": ["10.0.0.2"], "10.0.0.3": []}


def members(listed: str, registered: str) -> Members:
    pools = {side: Pool() for side in Side}
    made = Members(pools, {Side.DECODE: [Endpoint.parse(listed)]}, Incidents(), suspect=3.0, dead=5.0)
    made.register(0.0, Register("d", "1", Role.DECODE, registered, "10.0.0.1", 5600))
    return made


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Names with their addresses, in place of a name server."""
    known = {**NAMES}

    async def resolve(_: Any, host: str, port: int, **__: Any) -> list[Any]:
        if not known[host]:
            raise socket.gaierror(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in known[host]]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", resolve)
    return known


@pytest.mark.parametrize(
    ("listed", "registered"),
    [
        ("http://engine-0:8000", "http://10.0.0.1:8000"),
        ("http://localhost:8000", "http://127.0.0.1:8000"),
        ("http://[::1]:8000", "http://127.0.0.1:8000"),
    ],
)
async def test_engine_with_two_urls_is_reported_once(
    listed: str, registered: str, names: dict[str, list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    names |= {"localhost": ["127.0.0.1"], "127.0.0.1": ["127.0.0.1"], "::1": ["127.0.0.2"]}
    aliases = Aliases(members(listed, registered))
    for _ in range(3):
        await aliases.look()
    (record,) = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert f"is listed as {listed} and registers as {registered}" in record.getMessage()


@pytest.mark.parametrize(
    ("listed", "registered"),
    [
        ("http://engine-0:8000", "http://10.0.0.1:8001"),
        ("http://engine-0:8000", "http://10.0.0.2:8000"),
        ("http://engine-0:8000", "http://10.0.0.3:8000"),
        ("http://10.0.0.1:80", "http://10.0.0.1"),
        ("HTTP://Engine-0:8000", "http://engine-0:8000"),
    ],
)
async def test_other_engines_and_one_with_one_url_are_not_reported(
    listed: str, registered: str, names: dict[str, list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    await Aliases(members(listed, registered)).look()
    assert not [one for one in caplog.records if "is listed as" in one.getMessage()]


async def test_name_without_an_address_is_resolved_at_the_next_look(
    names: dict[str, list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    names["engine-0"] = []
    aliases = Aliases(members("http://engine-0:8000", "http://10.0.0.1:8000"))
    await aliases.look()
    assert "is listed as" not in caplog.text
    names["engine-0"] = ["10.0.0.1"]
    await aliases.look()
    assert "is listed as" in caplog.text


async def test_name_that_has_another_address_by_now_is_not_reported(
    names: dict[str, list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    other = members("http://engine-0:8000", "http://10.0.0.2:8000")
    aliases = Aliases(other)
    await aliases.look()
    names["engine-0"] = ["10.0.0.3"]
    other.register(0.0, Register("e", "1", Role.DECODE, "http://10.0.0.1:8000", "10.0.0.1", 5600))
    await aliases.look()
    assert "is listed as" not in caplog.text


async def test_url_that_cannot_be_resolved_leaves_the_others(
    names: dict[str, list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    known = members("http://engine-0:8000", "http://10.0.0.1:8000")
    known.register(0.0, Register("e", "1", Role.DECODE, "http://10.0.0.1:99999", "10.0.0.1", 5601))
    await Aliases(known).look()
    assert "is listed as http://engine-0:8000" in caplog.text


@pytest.mark.parametrize(
    ("listed", "registered"),
    [("http://H:8000", "http://h:8000"), ("http://h:80", "http://h"), ("https://h:443", "https://h")],
)
def test_urls_that_differ_in_spelling_alone_are_of_one_engine(listed: str, registered: str) -> None:
    states = members(listed, registered).states()[Side.DECODE]
    assert list(states) == [registered]
    assert Endpoint.parse("http://h:8080").url == "http://h:8080"
    assert Endpoint.parse("https://h:80").url == "https://h:80"
