"""Chromium without a window, driven by its DevTools protocol: opens, queries and photographs pages."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from kv_connector.lab.process import Process

# Seconds. A page that is still wrong after this time stays wrong.
PATIENCE = 20.0

# Chromium only has to show the page that it is given.
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    # A scrollbar takes 15 pixels off a picture's right edge, but none off the page's layout.
    "--hide-scrollbars",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
)


def find_chromium() -> str | None:
    return shutil.which("chromium")


class BrowserPage:
    """One tab. ``complaints``: exceptions and content security policy refusals from its console."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.complaints: list[str] = []
        self._socket = socket
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def listen(self) -> None:
        async for frame in self._socket:
            message = json.loads(frame.data)
            if (waiting := self._waiting.pop(message.get("id"), None)) is not None:
                waiting.set_result(message)
            elif message.get("method") == "Runtime.exceptionThrown":
                self.complaints.append(str(message["params"]["exceptionDetails"]))
            elif message.get("method") == "Log.entryAdded":
                self.complaints.append(message["params"]["entry"]["text"])

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(2 * PATIENCE):
            answer = await waiting
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    async def open(self, url: str) -> None:
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def evaluate(self, expression: str) -> Any:
        """Returns the value of a JavaScript expression. A promise is awaited."""
        answer = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, f"{expression}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    async def until(self, condition: str) -> None:
        """Waits until the condition holds in the document."""
        await self.evaluate(
            f"""new Promise((resolve, reject) => {{
              const holds = () => {{ if ({condition}) {{ seeing.disconnect(); resolve(); }} }};
              const seeing = new MutationObserver(holds);
              const everything = {{ subtree: true, childList: true, characterData: true, attributes: true }};
              seeing.observe(document, everything);
              addEventListener("load", holds);
              setTimeout(() => reject(document.body.innerText), {PATIENCE * 1000});
              holds();
            }})"""
        )

    async def text(self, selector: str = "body") -> str:
        """Returns the text of an element as a reader sees it."""
        text: str = await self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")
        return text

    async def screen(self, width: int, height: int, *, dark: bool = False, scale: float = 1) -> None:
        """Sets the screen that the page is shown on from now on."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def picture(self) -> bytes:
        """Returns a PNG of the whole page."""
        answer = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(answer["data"])


class Chromium:
    def __init__(self, client: aiohttp.ClientSession, port: int) -> None:
        self._client = client
        self._port = port

    @contextlib.asynccontextmanager
    async def page(self, url: str) -> AsyncIterator[BrowserPage]:
        """Opens the URL in a new tab."""
        async with self._client.put(f"http://127.0.0.1:{self._port}/json/new?about:blank") as answer:
            address = (await answer.json())["webSocketDebuggerUrl"]
        async with self._client.ws_connect(address, max_msg_size=64 << 20) as socket:
            page = BrowserPage(socket)
            listening = asyncio.create_task(page.listen())
            try:
                await page.open(url)
                yield page
                await page.call("Page.close")
            finally:
                listening.cancel()
                await asyncio.gather(listening, return_exceptions=True)


@contextlib.asynccontextmanager
async def chromium(executable: str, directory: Path) -> AsyncIterator[Chromium]:
    """Runs Chromium with a new profile in ``directory``."""
    profile = directory / "profile"
    command = [executable, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    environment = {"HOME": str(directory)}
    process = Process("chromium", command, environment=environment, log=directory / "chromium.log")
    try:
        port = await asyncio.to_thread(_port, process, profile / "DevToolsActivePort")
        async with aiohttp.ClientSession() as client:
            yield Chromium(client, port)
    finally:
        process.kill()


def _port(process: Process, file: Path) -> int:
    """Reads the DevTools port from the file that Chromium writes."""
    deadline = time.monotonic() + PATIENCE
    while not file.exists() or "\n" not in file.read_text():
        assert process.running(), f"chromium has ended:\n{process.log_tail()}"
        assert time.monotonic() < deadline, f"chromium tells no port:\n{process.log_tail()}"
        time.sleep(0.05)
    return int(file.read_text().split("\n")[0])
