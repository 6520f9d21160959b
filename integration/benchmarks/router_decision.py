"""Cost of a router's decision: time of cache-aware placement, and memory of the prefix index.

Conversations fill the index: each has its engines on both sides, and all begin with one system prompt. The
measured requests are next turns of random conversations. The other lines are the cost of collecting an
answer, and for how long bodies hold the event loop that are made to be slow.
"""
# ruff: noqa: T201  (its output is a table)

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence
from functools import partial

from kv_connector.router.bodies.body_parser import LONG
from kv_connector.router.bodies.fields import parse
from kv_connector.router.bodies.prompt import Prompt
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.members import TEXT_SIDES, Side
from kv_connector.router.engines.pool import Pool
from kv_connector.router.engines.prefix_cache import PrefixIndex
from kv_connector.router.engines.workload import Workload
from kv_connector.router.placement.cache_aware import CacheAware
from kv_connector.router.placement.policy import PlacementRequest
from kv_connector.router.placement.records import CacheRecords
from kv_connector.router.requests.completion import Completion
from kv_connector.router.requests.transcript import Budget, Transcript

PATH = "/v1/chat/completions"
ROOM = 1 << 22  # tokens, so that no prefix is dropped


def words(rng: random.Random, size: int) -> str:
    text = "".join(rng.choices("abcdefghij klmnopqrst uvwxyz ", k=256))
    return (text * (size // 256 + 1))[:size]


def timed(calls: Sequence[Callable[[], object]]) -> str:
    """Returns processor time, which other programs of the machine do not lengthen."""
    times = []
    for call in calls:
        began = time.thread_time()
        call()
        times.append((time.thread_time() - began) * 1e6)
    return f"{statistics.median(times):.0f} / {statistics.quantiles(times, n=100)[-1]:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", type=int, default=64, help="engines, half of them on each side")
    parser.add_argument("--prefixes", type=int, default=100_000, help="prefixes in the index")
    parser.add_argument("--size", type=int, default=25 << 10, help="bytes of a conversation")
    parser.add_argument("--requests", type=int, default=1000)
    plan = parser.parse_args()
    rng = random.Random(1)
    pools = {side: Pool() for side in TEXT_SIDES}
    index, caches = PrefixIndex(), CacheRecords()
    policy = CacheAware(pools, index, caches.sizes)
    engines: dict[Side, list[Workload]] = {side: [] for side in TEXT_SIDES}
    for number in range(plan.engines):
        side = TEXT_SIDES[number % 2]
        endpoint, workload = Endpoint.parse(f"http://{side.value}{number}:1"), Workload()
        pools[side].set_usable(endpoint, True, workload, prefixes="same", borrows=True)
        index.add(workload.cache)
        engines[side].append(workload)
    system = {"role": "system", "content": words(rng, 4000)}

    def body(number: int, *more: str) -> bytes:
        chat = random.Random(number)
        turns = [words(chat, 1500) for _ in range(max(1, (plan.size - 4000) // 1500))]
        said = [{"role": ("user", "assistant")[at % 2], "content": t} for at, t in enumerate((*turns, *more))]
        return json.dumps({"model": "m", "messages": [system, *said], "stream": True}).encode()

    def prompt(number: int) -> Prompt:
        return Completion.decode(body(number)).prompt(PATH)

    each = len(prompt(0).prefixes)
    count = plan.prefixes // each
    gc.collect()
    tracemalloc.start()
    for number in range(count):
        seen = prompt(number)
        for side in TEXT_SIDES:
            rng.choice(engines[side]).cache.prompt_computed(seen, ROOM)
    gc.collect()
    nbytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    print(f"{plan.engines} engines, {count} conversations of {each} prefixes, {len(index)} entries")
    print(f"memory: {nbytes / 1e6:.1f} MB, {nbytes / len(index):.0f} bytes for an entry")
    raw = [body(rng.randrange(count), words(rng, 800)) for _ in range(plan.requests)]

    def turns() -> list[Completion]:
        return list(map(Completion.decode, raw))

    prompts = [turn.prompt(PATH) for turn in turns()]
    gc.disable()
    print("us, p50 / p99")
    print("hash the prompt:", timed([partial(turn.prompt, PATH) for turn in turns()]))
    print("look into the index:", timed([partial(index.matches, one) for one in prompts]))
    placed = [partial(policy.place, PlacementRequest(turn, PATH, session=1)) for turn in turns()]
    print("place, with the hash:", timed(placed))
    print(f"transcript: {_transcript():.2f} us for an event of a chat")
    print(f"ms in the event loop for a body of {LONG >> 10} KiB, best of 5")
    for name, (path, hostile) in _bodies().items():
        print(f"{name}: {_held(path, hostile):.2f}")


def _transcript() -> float:
    """Returns the microseconds in which a transcript takes an event of a chat, at best of 5."""
    choice = {"index": 0, "delta": {"content": " word"}, "logprobs": None, "finish_reason": None}
    head = {
        "id": "chatcmpl-" + "0" * 32,
        "object": "chat.completion.chunk",
        "created": 1764400000,
        "model": "m",
    }
    event = b"data: " + json.dumps({**head, "choices": [choice]}).encode() + b"\n\n"
    times = []
    for _ in range(5):
        transcript = Transcript(PATH, Budget())
        began = time.perf_counter()
        for _ in range(10_000):
            transcript.add(event)
        times.append((time.perf_counter() - began) * 1e6 / 10_000)
    return min(times)


def _bodies() -> dict[str, tuple[str, bytes]]:
    """Returns paths and bodies, each of about LONG bytes, by name."""

    def filled(field: str, begin: str, unit: str, end: str) -> tuple[str, bytes]:
        head, tail = f'{{"{field}":{begin}', f"{end}}}"
        path = {"prompt": "/v1/completions", "system": "/v1/messages"}.get(field, PATH)
        return path, (head + unit * ((LONG - len(head) - len(tail)) // len(unit)) + tail).encode()

    fields = "".join(f',"{number:x}":0' for number in range(LONG // 9))
    message = f'{{"role":"user","content":"{"x" * (LONG // 2047 - 28)}"}},'
    parts = '[{"role":"","content":['
    several = [b'"%d":[%s0]' % (number, b"{}," * 80) for number in range(250)]
    return {
        "text": filled("prompt", '"', "x", '"'),
        "token ids": filled("prompt", "[", "1,", "1]"),
        "one message of many fields": (PATH, f'{{"messages":[{{"role":""{fields}}}]}}'.encode()),
        "messages, as many as are read": filled("messages", "[", message, '{"role":""}]'),
        "the shortest messages": filled("messages", "[", '{"role":""},', '{"role":""}]'),
        "the shortest messages and another": filled("messages", "[", '{"role":""},', '{"x":""}]'),
        "objects": filled("messages", "[", "{},", "{}]"),
        "parts without fields": filled("messages", parts, "{},", "{}]}]"),
        "parts": filled("messages", parts, '{"type":"a"},', "{}]}]"),
        "pictures": filled("messages", parts, '{"type":";base64,"},', "{}]}]"),
        "blocks of a system prompt": filled("system", "[", '{"type":""},', '{"type":""}]'),
        "other fields": (PATH, b"{%s}" % b",".join(several)),
    }


def _held(path: str, raw: bytes) -> float:
    """Returns the milliseconds from a body to its prompt, at best of 5."""
    times = []
    for _ in range(5):
        began = time.perf_counter()
        completion = Completion.of_fields(parse(raw))
        completion.local_reason()
        completion.late_reason()
        completion.prompt(path)
        completion.prefill_body("t", serial=False)
        completion.decode_body({})
        times.append((time.perf_counter() - began) * 1e3)
    return min(times)


if __name__ == "__main__":
    main()
