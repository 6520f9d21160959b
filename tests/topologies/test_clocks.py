"""A chat template prints the hour, and P has another time zone than D: each request has two prompts.

D's prompt is the right one. D computes it with any load failure policy, and P keeps nothing.
"""

from __future__ import annotations

import ast
import asyncio
import json
import re
import string
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import pytest
from cases import Side
from deployment import TIMEOUTS, Client, RefusedCall, assert_quiescent, completion_body, prompt, wait_logged
from site_of_case import Models, engine_settings_of

from kv_connector.lab.cluster import HOST, MODEL_NAME, EngineProcess, LocalCluster
from kv_connector.lab.free_ports import free_ports
from kv_connector.protocol.actions import Outcome

pytestmark = pytest.mark.anyio

TEMPLATE = "T{{ strftime_now('%H') }} {% for m in messages %}{{ m.content }}{% endfor %}\n"
# POSIX's form of a time zone, nine hours ahead like Tokyo's: it needs no database of zones.
TOKYO, UTC = "JST-9", "UTC0"
POLICIES = ("fail", "recompute")
DISPATCHES = ("concurrent", "serial", "early")
# Longer than a test waits for anything: a prompt that is not freed fails the test.
KEPT = TIMEOUTS | {"hold": 600.0, "orphan": 600.0}

CHATS = 4
OUTPUT = 8
# Each of these tokens is a printable character: the first one may come from P.
READABLE = list(range(94))
WORDS = (
    r"transfer \S+: the decode engine computes its prompt itself: prompt_mismatch: the prompts differ: "
    r"compare both engines' chat template, tokenizer, clock, time zone"
)
BROKEN_OFF = (
    r"the answer is broken off: the decode engine began with .* where the prefill engine had sampled (.+)"
)
MISMATCHES = 'kv_connector_router_early_tokens_total{outcome="mismatch"}'


@dataclass(frozen=True)
class Decode:
    """A decode engine with one policy, and its routers by their dispatch."""

    engine: EngineProcess
    routers: dict[str, str]


@dataclass(frozen=True)
class Clocks:
    prefill: EngineProcess
    decodes: dict[str, Decode]
    known: dict[tuple[int, ...], str] = field(default_factory=dict)
    """Answer of an engine alone, by prompt."""


@pytest.fixture(scope="module")
def clocks(
    models: Models, interpreter: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Clocks]:
    with LocalCluster(tmp_path_factory.mktemp("clocks"), models["llama"]) as cluster:
        cluster.interpreter = interpreter
        ports = dict(zip(POLICIES, free_ports(len(POLICIES)), strict=True))
        words = ("--chat-template", TEMPLATE)
        extra = {"timeouts": KEPT}
        cluster.environment = {"TZ": TOKYO}
        prefill = cluster.start_engine(
            "prefill",
            role="kv_producer",
            extra=extra,
            # P needs one step and D six, so P's token is known first.
            settings=engine_settings_of(Side(chunk=1024), words),
            routers=[f"{HOST}:{port}" for port in ports.values()],
        )
        cluster.environment = {"TZ": UTC}
        decodes = {}
        for policy, port in ports.items():
            engine = cluster.start_engine(
                f"decode-{policy}",
                role="kv_consumer",
                extra=extra,
                settings=engine_settings_of(Side(chunk=64), words),
                routers=[f"{HOST}:{port}"],
                on_load_failure=policy,  # type: ignore[arg-type]
            )
            start = partial(cluster.start_router, prefill=[prefill], decode=[engine])
            routers = {
                "concurrent": start(f"concurrent-{policy}"),
                "serial": start(f"serial-{policy}", dispatch="serial"),
                "early": cluster.start_router(f"early-{policy}", registration=port),
            }
            decodes[policy] = Decode(engine, routers)
        cluster.wait_ready()
        for decode in decodes.values():
            cluster.wait_joined(decode.routers["early"], prefill, decode.engine)
        yield Clocks(prefill, decodes)


def chat(number: int) -> dict[str, object]:
    letters = "".join(string.ascii_letters[token % 52] for token in prompt(f"chat {number}", 350))
    body: dict[str, object] = completion_body(None, OUTPUT, allowed_token_ids=READABLE)
    del body["prompt"], body["return_token_ids"]
    return {**body, "messages": [{"role": "user", "content": letters}]}


async def rendered(client: Client, engine: EngineProcess, body: dict[str, object]) -> list[int]:
    """Returns the prompt that the engine renders from the chat now."""
    asked = {"model": MODEL_NAME, "messages": body["messages"]}
    tokens: list[int] = (await client.post(f"{engine.url}/tokenize", asked))["tokens"]
    return tokens


async def truth(client: Client, clocks: Clocks, decode: EngineProcess) -> tuple[list[str], list[str]]:
    """Returns D's answers, without P, to its own prompts and to those of P."""
    both = []
    for engine in (decode, clocks.prefill):
        prompts = [tuple(await rendered(client, engine, chat(number))) for number in range(CHATS)]
        for tokens in prompts:
            if tokens not in clocks.known:
                body = completion_body(tokens, OUTPUT, allowed_token_ids=READABLE)
                answer = await client.post(f"{decode.url}/v1/completions", body)
                clocks.known[tokens] = answer["choices"][0]["text"]
        both.append([clocks.known[tokens] for tokens in prompts])
    return both[0], both[1]


async def answered(client: Client, router: str, body: dict[str, object], *, stream: bool) -> str:
    url = f"{router}/v1/chat/completions"
    if not stream:
        text: str = (await client.post(url, body))["choices"][0]["message"]["content"]
        return text
    events = await client.events(url, body | {"stream": True})
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events)


async def ended(client: Client, *engines: EngineProcess) -> Counter[str]:
    """Returns the ends of the engines' transfers: counts by side and outcome."""
    found: Counter[str] = Counter()
    for engine in engines:
        stats = await client.stats(engine)
        names = (f"{side}_{outcome.value}" for side in ("sent", "received") for outcome in Outcome)
        found.update({name: int(stats.get(name, 0)) for name in names})
    return found


async def counter(client: Client, router: str, name: str) -> float:
    found = re.findall(rf"^{re.escape(name)} (\S+)$", await client.get(f"{router}/metrics"), re.MULTILINE)
    return sum(map(float, found))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize("policy", POLICIES)
async def test_the_decode_engines_clock_counts(
    clocks: Clocks, client: Client, policy: str, dispatch: str, stream: bool
) -> None:
    """Each answer is the one that D alone gives to its own prompt. A stream that has begun with P's token
    ends with an error if D has another token. A request with equal prompts on both engines is loaded at the
    same time."""
    prefill, decode = clocks.prefill, clocks.decodes[policy].engine
    router = clocks.decodes[policy].routers[dispatch]
    chats = [chat(number) for number in range(CHATS)]
    bystander = prompt("bystander", 300)

    right, others = await truth(client, clocks, decode)
    assert right != others, "else either prompt would do"
    expected = await client.complete(decode.url, bystander, OUTPUT)
    await assert_quiescent(client, prefill, decode)  # with empty prefix caches
    before = await ended(client, prefill, decode)
    mismatches, since = await counter(client, router, MISMATCHES), decode.log.stat().st_size

    asked = [answered(client, router, body, stream=stream) for body in chats]
    *answers, beside = await asyncio.gather(
        *asked, client.stream(router, bystander, OUTPUT), return_exceptions=True
    )

    await assert_quiescent(client, prefill, decode)
    counted = await ended(client, prefill, decode) - before
    right_later, others_later = await truth(client, clocks, decode)  # a new hour may have begun
    for number, answer in enumerate(answers):
        if dispatch == "early" and stream and isinstance(answer, RefusedCall):
            broken_off = re.fullmatch(BROKEN_OFF, json.loads(answer.text)["error"]["message"])
            assert broken_off, answer
            theirs = {others[number][0], others_later[number][0]}
            assert ast.literal_eval(broken_off[1]) in theirs - {right[number][0], right_later[number][0]}
        else:
            assert answer in (right[number], right_later[number])
    assert beside == expected
    broken = sum(isinstance(answer, RefusedCall) for answer in answers)
    assert await counter(client, router, MISMATCHES) - mismatches == broken
    assert counted == {
        "received_stale": CHATS,
        "received_completed": 1,
        "sent_released": CHATS,
        "sent_completed": 1,
    }
    assert await counter(client, router, "kv_connector_router_retries_total") == 0
    await wait_logged(decode, WORDS, since)
