"""PrefillHold: a hold of a prefill engine is released if, and only if, no decode engine will load the
pages.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from kv_connector.router.engines.client import EngineClient
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.members import Side
from kv_connector.router.engines.pool import Lease, Pool
from kv_connector.router.failure import failure
from kv_connector.router.requests.completion import DISOWNED_PATH
from kv_connector.router.streams.calls import Call, EngineFailure
from kv_connector.router.streams.holds import PrefillHold, PrefillHolds

pytestmark = pytest.mark.anyio

PREFILL, DECODE = Endpoint.parse("http://p:1@10.0.0.1:5601"), Endpoint.parse("http://d:1")
FAILED = failure(502, "api_error", "no answer")


class Client:
    """An EngineClient that records the URLs of its requests and answers them by `answer`."""

    def __init__(self) -> None:
        self.urls: list[str] = []
        self.answer = asyncio.Event()

    async def whole(self, method: str, url: str, *_: Any) -> None:
        self.urls.append(url)
        await self.answer.wait()


class Site:
    def __init__(self, *, decode: bool = True, patience: float = 10.0) -> None:
        self.client = Client()
        self.pools = {Side.PREFILL: Pool([PREFILL]), Side.DECODE: Pool([DECODE] if decode else [])}
        self.holds = PrefillHolds(self.pools, cast("EngineClient", self.client), patience)
        self.lease: Lease = self.pools[Side.PREFILL].acquire(PREFILL)

    def hold(self) -> PrefillHold:
        return PrefillHold(self.holds, "t", self.lease, Call("/v1/completions", {}, "r"))

    def unfinished(self) -> int:
        return self.pools[Side.PREFILL].unfinished(PREFILL)

    async def close(self) -> None:
        self.client.answer.set()
        await self.holds.close()
        assert self.holds.releasing == 0


async def test_hold_that_ends_well_releases_nothing_and_lets_the_engine_be_idle() -> None:
    site = Site()
    with site.hold():
        with site.hold():
            site.lease.release()
        assert site.unfinished() == 1
    assert site.unfinished() == 0
    assert site.holds.releasing == 0
    await site.close()
    assert site.client.urls == []


@pytest.mark.parametrize(
    "error",
    [
        asyncio.CancelledError(),
        FAILED,
        EngineFailure(FAILED, {Side.DECODE: DECODE}),
        EngineFailure(FAILED, {Side.DECODE: DECODE, Side.PREFILL: PREFILL}),
    ],
    ids=["the client left", "a refusal", "decode failed", "either may have failed"],
)
async def test_hold_that_fails_is_released_by_a_decode_engine(error: BaseException) -> None:
    site = Site()
    with pytest.raises(type(error)) as raised, site.hold():
        raise error
    assert raised.value is error
    assert site.holds.releasing == 1
    await site.close()
    assert site.client.urls == [DECODE.url + DISOWNED_PATH]


async def test_hold_that_the_prefill_engine_alone_failed_is_left_to_it() -> None:
    site = Site()
    with pytest.raises(EngineFailure), site.hold():
        raise EngineFailure(FAILED, {Side.PREFILL: PREFILL})
    await site.close()
    assert site.client.urls == []


@pytest.mark.parametrize("decode", [True, False], ids=["the decode engine is silent", "no decode engine"])
async def test_release_that_fails_is_given_up_and_logged(
    decode: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kv_connector.router.streams.holds")
    site = Site(decode=decode, patience=0.01)
    site.holds.release("t", PREFILL, Call("/v1/completions", {}, "r"))
    await site.holds.close()
    assert site.holds.releasing == 0
    assert "keeps transfer t for its hold time" in caplog.text
    if decode:
        assert site.pools[Side.DECODE].outstanding(DECODE) == 0
