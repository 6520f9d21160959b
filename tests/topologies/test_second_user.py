"""One user shows P and D different inputs under one transfer. A second user's answer must still be right.

D caches a transfer's pages under its own block hashes, and the second user reads them from there. So P must
refuse every input that differs from the one that D hashes: the text, a picture, the adapter, the cache salt.
"""

from __future__ import annotations

import asyncio
import base64
import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
from cases import Case, Side
from deployment import Client, assert_quiescent, completion_body, decode_params, prefill_params
from kinds import PICTURE
from PIL import Image
from site_of_case import CaseCluster, Models

from kv_connector.lab.cluster import HOST, EngineProcess, LocalCluster

pytestmark = pytest.mark.anyio

OUTPUT = 16
HITS = "vllm:prefix_cache_hits_total"

LORA = "--enable-lora --max-lora-rank 8 --max-loras 2 --lora-modules adapter=@llava-adapter"
CASE = Case(
    "second-user",
    "llava",
    # An adapter of one name, from two paths.
    prefill=Side(f"{LORA} elsewhere=@llava-adapter", chunk=200),
    decode=Side(f"{LORA} elsewhere=@llava-other-adapter"),
    torchvision=True,
)


def png(seed: int) -> bytes:
    """Returns noise as a PNG."""
    pixels = np.random.default_rng(seed).integers(0, 256, (PICTURE, PICTURE, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def data_url(picture: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(picture).decode()


A, B = png(0), png(1)


def chat(*pictures: str, letter: str = "w", **more: Any) -> dict[str, Any]:
    """Returns a body with the pictures in the middle of several blocks of text. Bodies with other letters are
    as long."""
    shown = [{"type": "image_url", "image_url": {"url": url}} for url in pictures]
    system = {"role": "system", "content": letter * 70}
    user = {"role": "user", "content": [*shown, {"type": "text", "text": "What is it? " * 9}]}
    body: dict[str, Any] = completion_body(None, OUTPUT, messages=[system, user])
    del body["prompt"]
    return body | more


async def answer(client: Client, url: str, body: dict[str, Any]) -> list[int]:
    found = await client.post(f"{url}/v1/chat/completions", body)
    tokens: list[int] = found["choices"][0]["token_ids"]
    return tokens


class PictureServer(ThreadingHTTPServer):
    """Answers the first request with picture A and all others with B."""

    def __init__(self) -> None:
        super().__init__((HOST, 0), _Answer)
        self.asked = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/picture.png"

    @classmethod
    @contextmanager
    def serving(cls) -> Iterator[PictureServer]:
        with cls() as server:
            thread = threading.Thread(target=server.serve_forever, args=(0.02,))
            thread.start()
            try:
                yield server
            finally:
                server.shutdown()
                thread.join()


class _Answer(BaseHTTPRequestHandler):
    server: PictureServer

    def do_GET(self) -> None:
        with self.server.lock:
            picture = A if self.server.asked == 0 else B
            self.server.asked += 1
        self.send_response(200)
        self.send_header("Content-Type", "image/png")
        self.send_header("Content-Length", str(len(picture)))
        self.end_headers()
        self.wfile.write(picture)

    def log_message(self, *_: object) -> None:
        pass


@dataclass(frozen=True)
class Variant:
    """The inputs that P and D receive for the first user's request."""

    prefill: dict[str, Any]
    decode: dict[str, Any]
    dispatch: str = ""
    """Dispatch of the router that gets a URL of a PictureServer. Empty: the request goes past the routers."""
    same: bool = False
    """Whether both inputs have the same right answer: the salt does not change it."""


VARIANTS = {
    "text": Variant(chat(letter="v"), chat(letter="w")),
    "image-concurrent": Variant(chat(data_url(A)), chat(data_url(B)), dispatch="concurrent"),
    "image-serial": Variant(chat(data_url(A)), chat(data_url(B)), dispatch="serial"),
    "image-order": Variant(chat(data_url(A), data_url(B)), chat(data_url(B), data_url(A))),
    "adapter": Variant(chat(model="adapter"), chat()),
    "adapter-path": Variant(chat(model="elsewhere"), chat(model="elsewhere")),
    "adapter-image": Variant(chat(data_url(A), model="adapter"), chat(data_url(B), model="adapter")),
    "salt": Variant(chat(cache_salt="one"), chat(cache_salt="two"), same=True),
}


@dataclass(frozen=True)
class Engines:
    prefill: EngineProcess
    decode: EngineProcess
    alone: EngineProcess
    routers: dict[str, str]
    """Routers by their dispatch."""


@pytest.fixture(scope="module")
def engines(
    models: Models, interpreter: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    with LocalCluster(tmp_path_factory.mktemp("second-user"), models[CASE.model]) as cluster:
        cluster.interpreter = interpreter
        site = CaseCluster(cluster, CASE, models).start(with_alone=True)
        assert site.alone is not None
        serial = cluster.start_router(
            "serial", prefill=[site.prefill], decode=[site.decode], dispatch="serial"
        )
        cluster.wait_ready()
        routers = {"concurrent": site.router, "serial": serial}
        yield Engines(site.prefill, site.decode, site.alone, routers)


async def first_user(client: Client, engines: Engines, name: str) -> list[int]:
    """Sends the first user's request. Returns D's answer."""
    variant = VARIANTS[name]
    if variant.dispatch:
        with PictureServer.serving() as pictures:
            found = await answer(client, engines.routers[variant.dispatch], chat(pictures.url))
        assert pictures.asked == 2
        return found
    _, found = await asyncio.gather(
        answer(
            client,
            engines.prefill.url,
            variant.prefill | {"max_tokens": 1, "kv_transfer_params": prefill_params(name)},
        ),
        answer(
            client,
            engines.decode.url,
            variant.decode | {"kv_transfer_params": decode_params(name, engines.prefill)},
        ),
    )
    return found


@pytest.mark.parametrize("name", VARIANTS)
async def test_a_second_user_gets_the_right_answer(engines: Engines, client: Client, name: str) -> None:
    """Both requests get the right answer: D has computed its own prompt, and the blocks that it kept are
    right."""
    variant, decode = VARIANTS[name], engines.decode
    right = [await answer(client, engines.alone.url, body) for body in (variant.prefill, variant.decode)]
    at_prefill = await answer(client, engines.prefill.url, variant.prefill)
    assert (at_prefill == right[1]) == variant.same, "else any KV would do"
    await assert_quiescent(client, engines.prefill, decode)  # with empty prefix caches
    before = await client.stats(decode)

    first = await first_user(client, engines, name)
    after, hits = await client.stats(decode), decode.metric(HITS)
    second = {
        dispatch: [await answer(client, router, body) for body in (variant.prefill, variant.decode)]
        for dispatch, router in engines.routers.items()
    }

    assert second == dict.fromkeys(engines.routers, right)
    assert decode.metric(HITS) > hits, "nobody has read what D kept of the first user"
    # With a concurrent router, either engine may have got the first picture.
    assert first in (right if variant.dispatch == "concurrent" else right[1:])
    names = ("received_stale", "received_completed")
    assert [after.get(name, 0) - before.get(name, 0) for name in names] == [1, 0]
    await assert_quiescent(client, engines.prefill, decode)
