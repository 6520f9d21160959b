"""Makes docs/pictures/status.png: the router's status page on a desktop and on a phone.

The router serves two prefill and two decode engines under load, of which one is killed. It takes five minutes
on two cores.

    .venv/bin/python scripts/status_picture.py     (chromium: scripts/setup browser)
"""

import asyncio
import io
import itertools
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

import httpx
from PIL import Image

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tests" / "support"))

from chromium import chromium, find_chromium  # noqa: E402
from nursery import nursery  # noqa: E402

from kv_connector.lab.cluster import MODEL_NAME, EngineProcess, EngineSettings, LocalCluster  # noqa: E402
from kv_connector.lab.free_ports import free_ports  # noqa: E402
from kv_connector.lab.model import make_llama  # noqa: E402

PICTURE = ROOT / "docs" / "pictures" / "status.png"
# Seconds of load before an engine is killed, which are the picture's curves, and seconds after that.
LOAD_SECONDS = 100.0
AFTERMATH_SECONDS = 9.0
CLIENTS = 4
PROMPT_TOKENS = (100, 1200)
OUTPUT_TOKENS = 24
# The page has 96 colours, including the edges of its letters.
COLOURS = 96
SCALE = 1.5
GAP = 24


async def load(router: str) -> None:
    """Sends requests until it is cancelled. Failed answers are part of the picture."""
    seeds = itertools.count()
    async with httpx.AsyncClient(base_url=router, timeout=60) as client:

        async def ask_on() -> None:
            while True:
                rng = random.Random(next(seeds))
                prompt = [rng.randrange(32, 127) for _ in range(rng.randint(*PROMPT_TOKENS))]
                body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "stream": True}
                try:
                    await client.post("/v1/completions", json=body)
                except httpx.HTTPError:
                    await asyncio.sleep(1)

        await asyncio.gather(*(ask_on() for _ in range(CLIENTS)))


async def look(router: str, victim: EngineProcess, directory: Path) -> Image.Image:
    executable = find_chromium()
    if executable is None:
        raise SystemExit("no chromium: scripts/setup browser")
    loading = asyncio.create_task(load(router))
    await asyncio.sleep(LOAD_SECONDS)
    async with chromium(executable, directory) as browser, browser.page(router) as page:
        victim.kill()
        await asyncio.sleep(AFTERMATH_SECONDS)
        shots = []
        for width, height, dark in ((1040, 700, False), (390, 844, True)):
            await page.screen(width, height, dark=dark, scale=SCALE)
            await asyncio.sleep(2)  # the page redraws with its next query
            shots.append(Image.open(io.BytesIO(await page.picture())).convert("RGB"))
        assert not page.complaints, page.complaints
    loading.cancel()
    await asyncio.gather(loading, return_exceptions=True)
    return beside(*shots)


def beside(desk: Image.Image, phone: Image.Image) -> Image.Image:
    """Cuts the phone's page to the height of the desktop's."""
    phone = phone.crop((0, 0, phone.width, min(phone.height, desk.height)))
    both = Image.new("RGB", (desk.width + GAP + phone.width, desk.height), "white")
    both.paste(desk, (0, 0))
    both.paste(phone, (desk.width + GAP, 0))
    return both.quantize(COLOURS, dither=Image.Dither.NONE)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="kv-connector-picture-") as name:
        directory = Path(name)
        model = make_llama(directory / "model", layers=8)
        settings = EngineSettings(max_model_len=2048)
        with (
            nursery(directory, {"OMP_NUM_THREADS": "1"}) as interpreter,
            LocalCluster(directory / "logs", model, settings) as cluster,
        ):
            cluster.interpreter = interpreter
            (port,) = free_ports(1)
            joining = [f"127.0.0.1:{port}"]
            roles: list[Literal["kv_producer", "kv_consumer"]]
            roles = ["kv_producer", "kv_producer", "kv_consumer", "kv_consumer"]
            engines = [
                cluster.start_engine(f"engine{number}", role=role, routers=joining)
                for number, role in enumerate(roles)
            ]
            cluster.wait_ready()
            router = cluster.start_router("router", registration=port)
            cluster.wait_ready()
            time.sleep(2)  # until all four have joined
            picture = asyncio.run(look(router, engines[-1], directory))
    PICTURE.parent.mkdir(exist_ok=True)
    picture.save(PICTURE, optimize=True)


if __name__ == "__main__":
    main()
