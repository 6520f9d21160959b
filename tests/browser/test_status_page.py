"""The router's status page in a real browser."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from chromium import BrowserPage, Chromium
from router_setup import PATIENCE, answer_ok, cluster, refuse, serve, serve_engine, within
from starlette.requests import Request
from starlette.responses import Response

from kv_connector.control.membership import Activity, Register
from kv_connector.control.registrar import Registrar
from kv_connector.lab.free_ports import free_ports
from kv_connector.protocol.actions import Address
from kv_connector.protocol.wire.messages import Role
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.workload import CacheUse
from kv_connector.router.front.app import create_app
from kv_connector.router.settings import RouterSettings

pytestmark = pytest.mark.anyio

COMPLETION = {"prompt": "the secret of the prompt", "max_tokens": 3}
# If the page took this for HTML anywhere, its title would show it.
HOSTILE = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"


@contextlib.asynccontextmanager
async def shown(browser: Chromium, client: httpx.AsyncClient) -> AsyncIterator[BrowserPage]:
    """Opens the status page of the client's router. The test fails if the browser complains about the
    page."""
    async with browser.page(str(client.base_url)) as page:
        await page.until("document.querySelectorAll('#engines tr').length > 0")
        yield page
        assert page.complaints == []


def has(selector: str, text: str) -> str:
    """Returns the condition that an element is visible and contains the text."""
    element = f"document.querySelector('{selector}')"
    return f"{element}.checkVisibility() && {element}.innerText.includes({text!r})"


async def test_it_shows_what_happens_while_it_is_open(browser: Chromium) -> None:
    async def decode(request: Request, body: dict[str, Any]) -> Response:
        return await d.until_gone(request) if body["max_tokens"] == 99 else await answer_ok(request, body)

    async with cluster(answer_ok, decode) as (_, d, client), shown(browser, client) as page:
        assert await page.text("#verdict") == "2 engines ready"
        assert "0 so far" in await page.text("#answers")
        assert await page.text("#failures") == "none"
        for _ in range(3):
            assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200
        await page.until(has("#answers", "3 so far"))
        assert "ms" in await page.text("#p50")
        d.arrived.clear()
        asking = asyncio.create_task(client.post("/v1/completions", json=COMPLETION | {"max_tokens": 99}))
        await within(d.arrived.wait())
        await page.until(has("#in-flight", "1"))
        asking.cancel()
        await within(d.aborted.wait())
        await page.until(has("#in-flight", "0"))


async def test_page_shows_where_cached_tokens_came_from(
    browser: Chromium, monkeypatch: pytest.MonkeyPatch
) -> None:
    use = CacheUse(predicted=12345, actual=12000, borrowed=Counter({Endpoint.parse("http://gone:1"): 678}))
    monkeypatch.setattr("kv_connector.router.engines.workload.CacheUse", lambda: use)
    async with cluster(answer_ok, answer_ok) as (_, _, client), shown(browser, client) as page:
        await page.until(has("#engines", "12,000 of 12,345"))
        await page.until(has("#engines", "678 from an engine"))


async def test_page_shows_a_failure_with_its_reason_and_no_secret(browser: Chromium) -> None:
    decode = refuse(500, f"{COMPLETION['prompt']}{HOSTILE}")
    async with cluster(answer_ok, decode) as (p, d, client), shown(browser, client) as page:
        headers = {"x-request-id": "request-of-alice"}
        for _ in range(2):
            answer = await client.post("/v1/completions", json=COMPLETION, headers=headers)
            assert answer.status_code == 500
        await page.until(has("#failures", "decode 1 answers 500"))
        await page.until(has("#failures", "\N{MULTIPLICATION SIGN} 2"))
        await page.until(has("#failed", "2"))
        everything = await page.evaluate("document.documentElement.outerHTML")
        secrets = (p.url, d.url, "127.0.0.1", "10.0.0.1", "alice", "secret", 'onerror="doc')
        assert [secret for secret in secrets if secret in everything] == []


async def test_an_operator_sees_an_engines_words_as_text(browser: Chromium) -> None:
    running = cluster(answer_ok, refuse(500, HOSTILE), status_details=True)
    async with running as (p, _, client), shown(browser, client) as page:
        assert p.url in await page.text("#engines")
        assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 500
        await page.until(has("#failures", "decode 1 answers 500"))
        assert "<img src=x" in await page.text("#failures")
        assert await page.evaluate("document.images.length + document.scripts.length") == 1
        assert "taken" not in await page.evaluate("document.title")


async def test_page_shows_the_lanes_of_joining_engines_and_marks_silent_engines(browser: Chromium) -> None:
    (port,) = free_ports(1)
    address = Address("127.0.0.1", port)
    settings = RouterSettings((), (), registration=address, suspect=1.5, dead=60)
    async with (
        serve_engine(answer_ok) as p,
        serve_engine(answer_ok) as d,
        contextlib.AsyncExitStack() as stack,
    ):
        registrars = {}
        for role, engine in ((Role.PREFILL, p), (Role.DECODE, d)):
            registration = Register(role.value, "1", role, engine.url, "127.0.0.1", 5600)
            activity = Activity({"verbs": 3}, 7, 0)
            registrar = Registrar(registration, [address], None, lambda told=activity: told)  # type: ignore[misc]  # mypy infers no lambda with a default
            registrars[role] = registrar
            stack.callback(registrar.close)
        async with (
            serve(create_app(settings)) as url,
            httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client,
            shown(browser, client) as page,
        ):
            await page.until(has("#verdict", "2 engines ready"))
            assert "verbs (3 peers)" in await page.text("#engines")
            assert "7 transfers in flight" in await page.text("#transfers")
            registrars[Role.DECODE]._routers.clear()  # like a process that was stopped
            await page.until(has("#verdict", "no decode engine is ready"))
            await page.until("document.querySelector('#engines .silent')")
            await page.until(has("#failures", "decode 1 is silent"))


async def test_page_marks_a_router_without_answer_and_continues_with_its_next_answer(
    browser: Chromium,
) -> None:
    engines = (Endpoint.parse("http://127.0.0.1:1"),)
    (port,) = free_ports(1)
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(contextlib.AsyncExitStack())
        url = await first.enter_async_context(serve(create_app(RouterSettings(engines, engines)), port))
        page = await stack.enter_async_context(browser.page(url))
        await page.until("document.querySelectorAll('#engines tr').length > 0")
        assert await page.evaluate("document.getElementById('stale').hidden")
        await first.aclose()
        await page.until(has("#stale", "does not answer"))
        await stack.enter_async_context(serve(create_app(RouterSettings(engines, engines)), port))
        await page.until("document.getElementById('stale').hidden")


@pytest.mark.parametrize(("width", "height"), [(390, 844), (1280, 400)])
async def test_it_fits_a_phone_and_a_desk_in_the_light_and_in_the_dark(
    browser: Chromium, width: int, height: int
) -> None:
    grounds = []
    running = cluster(answer_ok, answer_ok, status_details=True)
    async with running as (_, _, client), shown(browser, client) as page:
        for dark in (False, True):
            await page.screen(width, height, dark=dark)
            # A phone makes its window as wide as the page.
            wide = await page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, "it has to be pushed sideways"
            grounds.append(await page.evaluate("getComputedStyle(document.body).backgroundColor"))
            picture = await page.picture()
            assert picture.startswith(b"\x89PNG")
            assert int.from_bytes(picture[16:20]) == width, "a part of the page is not in the picture"
    assert len(set(grounds)) == 2


async def test_numbers_beside_each_other_stand_on_one_line_when_a_label_is_broken(browser: Chromium) -> None:
    async with cluster(answer_ok, answer_ok) as (_, _, client), shown(browser, client) as page:
        await page.screen(360, 600)
        bottom = "document.getElementById({!r}).getBoundingClientRect().bottom"
        label = "document.querySelector('#{}').closest('div').querySelector('dt').offsetHeight"
        assert await page.evaluate(f"{label.format('p50')} > {label.format('pushing')}"), "no label is broken"
        assert await page.evaluate(f"{bottom.format('p50')} === {bottom.format('pushing')}")
