"""P and D in network namespaces whose connection is cut in both directions, or in one."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from deployment import Client
from fault_site import Load, Site, judge

pytestmark = pytest.mark.anyio

BRIDGE, ROUTER = "kvcbr0", "10.77.0.254"
ADDRESSES = {"p0": "10.77.0.1", "d0": "10.77.0.2", "d1": "10.77.0.3", "p1": "10.77.0.4"}


# Docker, once started, leaves a firewall that drops what a bridge forwards.
FORWARDED = ("FORWARD", "-i", BRIDGE, "-j", "ACCEPT")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def attempt(*command: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        subprocess.run(command, check=False, capture_output=True)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def network() -> Iterator[None]:
    """Makes a bridge with one namespace for each engine. The router is outside, at the bridge's address."""
    try:
        ip("link", "add", BRIDGE, "type", "bridge")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here (root and iproute2 are needed): {error}")
    try:
        ip("addr", "add", f"{ROUTER}/24", "dev", BRIDGE)
        ip("link", "set", BRIDGE, "up")
        attempt("iptables", "-I", *FORWARDED)
        for name, address in ADDRESSES.items():
            ip("netns", "add", f"kvc-{name}")
            ip("link", "add", f"kvc-{name}", "type", "veth", "peer", "name", "eth0", "netns", f"kvc-{name}")
            ip("link", "set", f"kvc-{name}", "master", BRIDGE, "up")
            for words in (
                ("addr", "add", f"{address}/24", "dev", "eth0"),
                ("link", "set", "eth0", "up"),
                ("link", "set", "lo", "up"),
            ):
                ip("-n", f"kvc-{name}", *words)
        yield
    finally:
        attempt("iptables", "-D", *FORWARDED)
        for name in ADDRESSES:
            attempt("ip", "netns", "del", f"kvc-{name}")
        attempt("ip", "link", "del", BRIDGE)


@pytest.fixture(scope="module")
async def site(network: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    with Site(tmp_path_factory.mktemp("partition"), model) as site:
        site.host = ROUTER
        site.extra = {"providers": ["tcp"]}
        site.namespaces = {name: (f"kvc-{name}", address) for name, address in ADDRESSES.items()}
        async with Client() as client:
            await site.begin(client, ADDRESSES)
        await site.until_ready()
        yield site


def cut(name: str, other: str) -> None:
    """Drops everything that ``name`` sends to ``other``."""
    ip("-n", f"kvc-{name}", "route", "add", "blackhole", f"{ADDRESSES[other]}/32")


def heal(name: str, other: str) -> None:
    attempt("ip", "-n", f"kvc-{name}", "route", "del", "blackhole", f"{ADDRESSES[other]}/32")


@pytest.mark.parametrize(
    "directions",
    [[("p0", "d0"), ("d0", "p0")], [("p0", "d0")], [("d0", "p0")]],
    ids=["both ways", "from P to D", "from D to P"],
)
async def test_cut_off_from_each_other(site: Site, client: Client, directions: list[tuple[str, str]]) -> None:
    """The router reaches both engines. Requests for this pair fail by the dead time, or are served by other
    engines."""
    async with Load(site) as load:
        await load.answered(6)
        load.note_fault()
        for direction in directions:
            cut(*direction)
        try:
            await asyncio.sleep(20)
        finally:
            for direction in directions:
                heal(*direction)
        await load.answered(12)
    outcome = load.outcome
    # During the cut this pair cannot serve. Failed requests are retried with other engines.
    judge(site, outcome, f"partition {directions}", may_fail=True, dead=20 + 5)
    await site.assert_at_rest(client)
