"""Decode engines killed under streams: streams that can continue do, and the others state why not."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deployment import Client, completion_body, engine_settings, prompt
from fault_site import Load, Site, judge, record
from nursery import nursery
from suite_numbers import positive_of, whole_of

from kv_connector.lab.sse import Events

pytestmark = pytest.mark.anyio

STREAMS = whole_of("KVC_FAULT_STREAMS", 100)
# The first stream has not ended when the prefill engine has computed the last prompt.
TOKENS = 400
# Tokens that each stream has at the kill. Streams are in the middle then: a server may send several tokens in
# an event.
BEGUN = 10
# Printable characters, so that there is text at each token.
PRINTABLE = list(range(94))

MINUTES = positive_of("KVC_FAULT_MINUTES", 10.0)
# The rolling kills: two of each side. A killed engine starts again in 4 s of a core.
ROLLING = ("p0", "d0", "p1", "d1")
CLIENTS = 12
OUTPUT = 400

# Fields of the first three of seven streams. The others are greedy, and the fourth is a chat. Seven is odd:
# the router may give the streams to its two decode engines in turn. None has a seed. vLLM on CPUs ends if the
# prompt of a request with a seed takes two steps ("CPU Generator does not use offset").
PENALTY: dict[str, Any] = {"presence_penalty": 0.5}
STOP: dict[str, Any] = {"stop": ["\n\n\n"]}
SAMPLED: dict[str, Any] = {"temperature": 1.0}


class Reading:
    """A client's stream."""

    def __init__(self, client: Client, router: str, number: int) -> None:
        self.number = number
        self.name = f"stream-{number}"
        self.more = dict(enumerate((PENALTY, STOP, SAMPLED))).get(number % 7, {})
        self.chat = number % 7 == 3
        self.tokens: list[int] = []
        self.text = ""
        self.error = ""
        self.times: list[float] = []
        self.begun = asyncio.Event()
        """Set when it has BEGUN tokens, or has ended."""
        self.task = asyncio.create_task(self._read(client, router))
        self.task.add_done_callback(lambda _: self.begun.set())

    @property
    def stays(self) -> bool:
        """Whether no other engine can continue it."""
        return self.more in (PENALTY, STOP)

    def request(self) -> tuple[str, dict[str, Any]]:
        ids = prompt(f"stream {self.number}", 20 + self.number)
        body = completion_body(ids, TOKENS, allowed_token_ids=PRINTABLE, **self.more)
        if not self.chat:
            return "/v1/completions", body
        del body["prompt"]
        text = "".join(chr(97 + one % 26) for one in ids)
        return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]}

    async def _read(self, client: Client, router: str) -> None:
        events, (path, body) = Events(), self.request()
        body["stream"] = True
        headers = {"x-request-id": self.name}
        async with client._http.stream("POST", router + path, json=body, headers=headers) as response:
            assert response.status_code == 200, await response.aread()
            async for chunk in response.aiter_bytes():
                for event in map(json.loads, events.feed(chunk)):
                    assert not self.error, "an event follows the error"
                    if "error" in event:
                        self.error = event["error"]["message"]
                        continue
                    for choice in event["choices"]:
                        self.tokens += choice.get("token_ids") or []
                        self.text += choice["delta"].get("content") or "" if self.chat else choice["text"]
                    self.times.append(time.monotonic())
                    if len(self.tokens) >= BEGUN:
                        self.begun.set()

    def pause(self, since: float) -> float:
        """Returns the longest pause that ended after this moment, in seconds."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return max((after - before for before, after in pairs if after > since), default=0.0)

    def assert_answer_of(self, answer: dict[str, Any]) -> None:
        """Checks the stream against the whole answer of an engine, up to the point where an error ended
        it."""
        choice = answer["choices"][0]
        text = choice["message"]["content"] if self.chat else choice["text"]
        tokens = choice["token_ids"]
        if self.error:
            tokens, text = tokens[: len(self.tokens)], text[: len(self.text)]
        assert (self.tokens, self.text) == (tokens, text), self.name


@asynccontextmanager
async def started(
    model: Path, client: Client, directory: Path, names: Sequence[str], output: int = 1
) -> AsyncIterator[Site]:
    """``output``: tokens of each answer of a Load."""
    with nursery(directory, {"OMP_NUM_THREADS": "1"}) as interpreter, Site(directory, model) as site:
        site.cluster.interpreter = interpreter
        # Blocks for all streams at one engine: a prompt and its answer have up to 17 blocks.
        site.output = output
        site.cluster.settings = replace(engine_settings(blocks=20 * STREAMS + 100), max_seqs=STREAMS)
        await site.begin(client, names)
        await site.until_ready()
        yield site


async def test_streams_of_a_killed_decode_engine(model: Path, client: Client, tmp_path: Path) -> None:
    async with started(model, client, tmp_path, ("p0", "d0", "d1")) as site:
        readings = [Reading(client, site.router, number) for number in range(STREAMS)]
        await asyncio.gather(*(one.begun.wait() for one in readings))
        killed = time.monotonic()
        running = [one for one in readings if not one.task.done()]
        await asyncio.to_thread(site.engines["d0"].kill)
        await asyncio.gather(*(one.task for one in readings))

        outcomes = await _outcomes(client, site)
        log = site.cluster.routers[site.router].log.read_text()
        names = set(re.findall(r"request (\S+): resumed on decode engine", log))
        resumed = [one for one in running if one.name in names]
        record(
            {
                "fault": f"kill -9 of one of two decode engines under {len(running)} streams",
                "outcomes": dict(outcomes),
                "pause_s": _spread([one.pause(killed) for one in resumed]),
                "longest_gap_of_the_others_s": _spread(
                    [one.pause(killed) for one in running if one not in resumed and not one.error]
                ),
            }
        )
        for reading in readings:
            assert not reading.error or reading.stays, f"{reading.name}: {reading.error}"
            assert not reading.error or "did not continue on another engine" in reading.error
            assert reading.error or len(reading.tokens) == TOKENS, reading.name
        assert len(names) == outcomes["resumed"] == len(resumed) >= STREAMS // 5
        errors = sum(bool(one.error) for one in readings)
        assert outcomes["penalties"] + outcomes["stop_strings"] == errors > 0
        assert outcomes.keys() == {"resumed", "penalties", "stop_strings"}
        exact = [one for one in readings if one.more is not SAMPLED]
        answers = await asyncio.gather(*(_whole(client, site.engines["d1"].url, one) for one in exact))
        for reading, answer in zip(exact, answers, strict=True):
            reading.assert_answer_of(answer)
        await site.assert_at_rest(client, "p0", "d1")


async def test_rolling_kills(model: Path, client: Client, tmp_path: Path) -> None:
    """One engine after another is killed without a drain, and starts again at other ports. No request fails:
    each is retried or continues."""
    async with started(model, client, tmp_path, ROLLING, OUTPUT) as site:
        kills: Counter[str] = Counter()
        async with Load(site, clients=CLIENTS) as load:
            await load.answered(CLIENTS)
            load.note_fault()
            end = time.monotonic() + MINUTES * 60
            while time.monotonic() < end:
                name = ROLLING[kills.total() % len(ROLLING)]
                await asyncio.to_thread(site.engines[name].kill)
                kills[name[0]] += 1
                new = site.start(name)
                await asyncio.to_thread(site.cluster.wait_ready, new)
                await site.until_ready()
            await load.answered(CLIENTS)
        outcomes = await _outcomes(client, site)
        what = f"{kills['p']} prefill and {kills['d']} decode engines killed in {MINUTES:g} min"
        judge(site, load.outcome, f"{what}, {dict(outcomes)}", may_fail=False)
        assert outcomes.keys() == {"resumed"}
        await site.assert_at_rest(client)


async def _whole(client: Client, engine: str, reading: Reading) -> dict[str, Any]:
    path, body = reading.request()
    return await client.post(engine + path, body)


async def _outcomes(client: Client, site: Site) -> Counter[str]:
    """Returns {outcome: streams whose engine has failed}."""
    name = "kv_connector_router_broken_streams_total{"
    text = await client.get(f"{site.router}/metrics")
    lines = [line for line in text.splitlines() if line.startswith(name)]
    return Counter({line.split('"')[1]: int(float(line.split()[-1])) for line in lines})


def _spread(seconds: list[float]) -> dict[str, float]:
    """Returns the median, the 99th percentile and the maximum."""
    ordered = sorted(seconds) or [0.0]
    places = {"p50": len(ordered) // 2, "p99": int(len(ordered) * 0.99), "max": len(ordered) - 1}
    return {name: round(ordered[place], 2) for name, place in places.items()}
