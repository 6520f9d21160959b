"""Conversations on two GPUs: plain engines, kv-connector, NixlConnector, and its bidirectional mode.

Needs vLLM with its GPU dependencies, two GPUs and this package; the systems nixl and bidirectional also need
NIXL. All engines have prefix caching. The model (shapes.py) has dummy weights: its tokens mean nothing, its
times do. The load is that of `kv-connector bench conversations`, with equal conversations for all systems:

- plain: an engine on each GPU. All turns of a conversation go to the same engine, without a router's hop.
- ours: a prefill and a decode engine behind our router, which proposes prefixes. The prefill engine has
  --no-async-scheduling, which a kv_producer needs in order to load prefixes. It loads each answer in the
  pause before the next turn.
- no-prefetch: the same with --no-prefetch-answers
- nixl: NixlConnector as it comes, behind our router with --serial.
- bidirectional: NixlConnector with bidirectional_kv_xfer. vLLM 0.32 returns the decode engine's blocks only
  in answers that are not streams. So the client here sends each turn to both engines, without a router. TTFT
  is the prefill engine's answer plus the decode engine's own TTFT. The time between tokens is one mean per
  answer. decoder_kv_blocks_ttl is shorter than its default of 480 s, which would fill the decode engine.

Phases:

- chat: the preset chat at a rate
- lost: one conversation at a time. The prefix cache of its prefill engine is reset before the second turn.
- agent: the first turns of the preset agent

Engines of a system that is not measured are stopped, except ours and no-prefetch, whose heartbeats would
miss. A JSON line is appended to --json after each turn and each measurement; --report prints the tables of
such files and exits. --limit ends the run with the results so far. --cpu runs everything with a tiny model on
CPUs: to try it, not to measure.
"""
# ruff: noqa: T201  (its output is tables)

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import aiohttp
import httpx
import msgspec
from conversation_goals import load_line, report
from conversation_systems import (
    CPU,
    GPU,
    SESSION,
    SYSTEMS,
    TIMEOUT,
    ConversationMachine,
    ConversationSystem,
    systems,
)
from gpu_engines import ENVIRONMENT, HOST, Body, GpuServer, direct, write_tiny
from gpu_goodput import write_tokenizer
from shapes import SHAPES

from kv_connector.bench.conversations.client import TurnError
from kv_connector.bench.conversations.counters import MetricsSource, Reading, engine, read_all, read_settled
from kv_connector.bench.conversations.load import ConversationLoad, Manner
from kv_connector.bench.conversations.prompts import Api, Scale, new_dialogue, piece
from kv_connector.bench.conversations.results import Turn
from kv_connector.bench.conversations.workload import ConversationShape, Pace
from kv_connector.lab.process import StartError, leave_on_signals

# In the order of their importance: the limit cuts the last ones.
PLAN = [
    ("chat", "plain"),
    ("chat", "ours"),
    ("chat", "nixl"),
    ("lost", "ours"),
    ("lost", "plain"),
    ("lost", "nixl"),
    ("chat", "bidirectional"),
    ("lost", "bidirectional"),
    ("agent", "ours"),
    ("agent", "plain"),
    ("agent", "bidirectional"),
    ("chat", "no-prefetch"),
]
# A measurement with less time than this has no useful result, and neither has a start of engines.
LEAST_SECONDS, LEAST_WITH_START = 12.0, 60.0
# The engines' reports to the router arrive after an answer.
REST_SECONDS = 0.3
FORGET_SECONDS = 8.0
SEED = 47
# Counters whose growth is a result. NIXL's bytes are the sum of a histogram.
COUNTERS = (
    "kv_connector_prefix_",
    "kv_connector_router_prefix_",
    "kv_connector_router_borrowed_",
    "kv_connector_router_answer_prefetches",
    "kv_connector_router_prefetched_",
    "kv_connector_router_predicted_",
    "kv_connector_router_actual_",
    "kv_connector_router_early_tokens",
    "vllm:nixl_bytes_transferred_sum",
    "vllm:nixl_num_",
    "vllm:num_preemptions",
)
_FAILURES = (TurnError, RuntimeError, httpx.HTTPError, aiohttp.ClientError, OSError, TimeoutError)


class Results:
    """The results so far. Each is a line of the file at once."""

    def __init__(self, sink: TextIO) -> None:
        self._sink = sink
        self.lines: list[dict[str, Any]] = []

    def add(self, line: Mapping[str, Any]) -> None:
        self.lines.append(dict(line))
        self.write(line)
        if line["kind"] == "load":
            print(report(self.lines[-1:]).partition("\ngoals")[0], flush=True)
        else:
            print("\n".join(f"{name}: {value}" for name, value in line.items()), flush=True)

    def write(self, line: Mapping[str, Any]) -> None:
        """Writes a line that is in no table."""
        self._sink.write(json.dumps(line) + "\n")
        self._sink.flush()

    def out(self, phase: str, system: str, reason: str) -> None:
        self.add({"kind": "out", "phase": phase, "system": system, "reason": reason})


class ConversationBench:
    """Measures systems that are up."""

    def __init__(self, machine: ConversationMachine, results: Results) -> None:
        self._machine = machine
        self._results = results
        self._warm: set[str] = set()

    async def measure(self, phase: str, system: ConversationSystem, seconds: float) -> None:
        """Measures one phase for at most so many seconds."""
        begin = time.perf_counter()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            if system.name not in self._warm:
                # The engines connect, and compile their kernels.
                warm = dataclasses.replace(self._machine.chat, conversations=2, turns=3)
                async with asyncio.timeout(seconds):
                    await self._load(system, http, warm, Pace(at_once=2), SEED + 1, [])
                self._warm.add(system.name)
                seconds -= time.perf_counter() - begin
            if phase == "lost":
                try:
                    async with asyncio.timeout(seconds):
                        await self._lose(system, http)
                except TimeoutError:
                    self._results.out(phase, system.name, f"cut after {seconds:.0f} s")
            elif phase == "chat":
                await self._converse(
                    phase, system, http, self._machine.chat, self._machine.pace, SEED, seconds
                )
            else:
                agent = self._machine.agent
                pace = Pace(at_once=agent.conversations)
                await self._converse(phase, system, http, agent, pace, SEED + 2, seconds)

    async def _converse(
        self,
        phase: str,
        system: ConversationSystem,
        http: aiohttp.ClientSession,
        shape: ConversationShape,
        pace: Pace,
        seed: int,
        seconds: float,
    ) -> None:
        sources = [MetricsSource(server.name, f"{server.url}/metrics") for server in system.servers]
        count = len(sources)
        if system.router is not None:
            sources.append(MetricsSource("router", f"http://{HOST}:{system.router.port}/metrics"))
        before = await read_all(http, sources)
        turns: list[Turn] = []
        begin = time.perf_counter()
        interrupted = False
        try:
            async with asyncio.timeout(seconds):
                await self._load(system, http, shape, pace, seed, turns, phase)
        except TimeoutError:
            interrupted = True
        duration = time.perf_counter() - begin
        after = await read_settled(http, sources)
        read = list(zip(sources, before, after, strict=True))
        engines = [engine(*one) for one in read[:count]]
        line = load_line(phase, system.name, turns, engines, duration, interrupted=interrupted)
        self._results.add({**line, "counters": growth(read)})
        if failed := [turn for turn in turns if turn.failed]:
            where = f"conversation {failed[0].conversation}, turn {failed[0].turn}"
            reason = f"{len(failed)} of {len(turns)} turns failed. The first: {where}: {failed[0].reason}"
            self._results.out(phase, system.name, f"{reason}\n{system.logs()}")

    async def _load(
        self,
        system: ConversationSystem,
        http: aiohttp.ClientSession,
        shape: ConversationShape,
        pace: Pace,
        seed: int,
        turns: list[Turn],
        phase: str = "",
    ) -> None:
        """Sends a load, and adds its turns to ``turns``. ``phase``: empty for the warm-up."""

        def record(turn: Turn) -> None:
            turns.append(turn)
            if phase:
                self._results.write(
                    {"kind": "turn", "phase": phase, "system": system.name, **msgspec.structs.asdict(turn)}
                )

        manner = Manner(api=Api.TOKENS, model="model", seed=seed, session_header=SESSION)
        await ConversationLoad(system.endpoints(http), manner, Scale(), record).converse(shape, pace)

    async def _lose(self, system: ConversationSystem, http: aiohttp.ClientSession) -> None:
        """Measures the turn after a loss of the cache, one conversation after another."""
        case = "loaded" if system.name in ("ours", "bidirectional") else "recomputed"
        lost = self._machine.lost
        endpoint = system.endpoints(http)[0]
        manner = Manner(api=Api.TOKENS, model="model", seed=SEED, session_header=SESSION)
        async with httpx.AsyncClient(timeout=TIMEOUT, trust_env=False) as client:
            for number in range(lost.rounds + 1):  # the first warms up
                headers = {SESSION: f"lost-{number}"}
                dialogue = new_dialogue(Api.TOKENS)
                dialogue.add("user", piece(Api.TOKENS, f"{SEED}:lost:{number}", lost.prompt))
                path = Api.TOKENS.path
                first = await endpoint.ask(path, manner.body(dialogue, lost.answer), headers)
                dialogue.add("assistant", first.token_ids)
                dialogue.add("user", piece(Api.TOKENS, f"{SEED}:lost:{number}:2", lost.message))
                await forget(client, system.prefill)
                body = manner.body(dialogue, lost.answer)
                answer = await endpoint.ask(path, body, headers)
                cached, tokens = answer.usage.cached_tokens, answer.usage.prompt_tokens
                self._lost(system, case, number, answer.first, tokens, cached)
                if system.name == "ours":
                    await forget(client, system.prefill)
                    prefill, decode = system.servers
                    prompt = Body(dialogue.body()["prompt"], lost.answer)
                    again = await direct(client, prefill, decode, prompt)  # names no lender
                    self._lost(system, "recomputed", number, again.ttft, tokens, None)

    def _lost(
        self, system: ConversationSystem, case: str, number: int, ttft: float, tokens: int, cached: int | None
    ) -> None:
        line = {
            "kind": "lost" if number else "warm-up",
            "phase": "lost",
            "system": system.name,
            "case": case,
            "round": number,
            "ttft_ms": round(ttft * 1e3, 2),
            "prompt_tokens": tokens,
            "cached_tokens": cached,
        }
        if number:
            self._results.add(line)
        else:
            self._results.write(line)


async def forget(client: httpx.AsyncClient, server: GpuServer) -> None:
    """Empties the engine's prefix cache. RuntimeError: it still holds blocks."""
    await asyncio.sleep(REST_SECONDS)
    deadline = time.monotonic() + FORGET_SECONDS
    while True:
        answer = await client.post(f"{server.url}/reset_prefix_cache")
        if answer.status_code == 200 and answer.json().get("success"):
            break
        if time.monotonic() > deadline:
            raise RuntimeError(f"{server.name} does not reset its prefix cache: {answer.text}")
        await asyncio.sleep(0.05)
    await asyncio.sleep(REST_SECONDS)


def growth(read: Sequence[tuple[MetricsSource, Reading, Reading]]) -> dict[str, float]:
    """Returns the growth of the counters in COUNTERS, of those that grew."""
    found: dict[str, float] = {}
    for source, before, after in read:
        for (name, labels), value in sorted(after.samples.items(), key=lambda item: item[0][0]):
            if not name.startswith(COUNTERS) or not name.endswith(("_total", "_sum")):
                continue
            if grown := value - before.samples.get((name, labels), 0.0):
                kept = sorted(f"{k}={v}" for k, v in labels if k not in ("model_name", "engine"))
                found[" ".join([source.name, name, *kept])] = grown
    return found


class ConversationRun:
    """The plan of a run: starts systems, measures their phases, and ends them."""

    def __init__(
        self,
        machine: ConversationMachine,
        systems: Mapping[str, ConversationSystem],
        results: Results,
        *,
        limit: float = float("inf"),
        start_seconds: float = 150.0,
    ) -> None:
        self._machine = machine
        self._systems = systems
        self._results = results
        self._deadline = time.monotonic() + limit
        self._start_seconds = start_seconds
        self._left: list[tuple[str, str]] = []
        self._out: set[str] = set()

    def run(self, plan: Sequence[tuple[str, str]], bench: ConversationBench) -> None:
        """Measures the phases of systems in this order, as long as there is time."""
        self._left = list(plan)
        while self._left:
            phase, name = self._left[0]
            system = self._systems[name]
            least = LEAST_SECONDS if system.up else LEAST_WITH_START
            if name in self._out:
                pass
            elif self._deadline - time.monotonic() < least:
                self._results.out(phase, name, "no time is left (--limit)")
            else:
                if not system.up:
                    self._end_finished()
                    self._start()
                if system.up:
                    self._measure(bench, phase, system)
            self._left.pop(0)

    def _end_finished(self) -> None:
        for system in self._systems.values():
            if system.up and system.name not in [name for _, name in self._left]:
                system.end()

    def _start(self) -> None:
        """Starts the next systems side by side, as many as fit."""
        room = self._machine.at_once - sum(system.up for system in self._systems.values())
        names = dict.fromkeys(name for _, name in self._left if name not in self._out)
        starting = [system for name in names if not (system := self._systems[name]).up][:room]
        begin = time.monotonic()
        for system in starting:
            print(f"starting {system.name}", flush=True)
            system.start()
        for system in starting:
            try:
                system.wait(begin + self._start_seconds)
            except StartError as error:
                self._leave_out("start", system, str(error))
        print(f"engines are up after {time.monotonic() - begin:.0f} s", flush=True)
        for system in starting:
            if system.up:
                system.rest()

    def _leave_out(self, phase: str, system: ConversationSystem, reason: str) -> None:
        self._results.out(phase, system.name, reason)
        self._out.add(system.name)
        system.end()

    def _measure(self, bench: ConversationBench, phase: str, system: ConversationSystem) -> None:
        seconds = max(LEAST_SECONDS, min(self._machine.seconds[phase], self._deadline - time.monotonic()))
        print(f"\n== {phase}, {system.name}", flush=True)
        begin = time.monotonic()
        try:
            with system.running():
                asyncio.run(bench.measure(phase, system, seconds))
        except (*_FAILURES, ExceptionGroup) as error:
            self._results.out(phase, system.name, f"{type(error).__name__}: {error}\n{system.logs()}")
        print(f"{phase}, {system.name}: {time.monotonic() - begin:.0f} s", flush=True)
        if dead := system.dead():
            self._leave_out(phase, system, f"{dead[0].name} ended by itself\n{system.logs()}")

    def end(self) -> None:
        for system in self._systems.values():
            system.end()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work", type=Path, default=Path("/tmp/kvc-conversations"), help="folder for the model and logs"
    )
    parser.add_argument(
        "--json", type=Path, default=Path(os.devnull), help="file to which JSON lines are appended"
    )
    parser.add_argument(
        "--report", type=Path, nargs="+", metavar="FILE", help="print the tables of these JSON files and exit"
    )
    parser.add_argument("--systems", nargs="+", default=[*SYSTEMS], choices=SYSTEMS)
    phases = [*dict.fromkeys(phase for phase, _ in PLAN)]
    parser.add_argument("--phases", nargs="+", default=phases, choices=phases)
    parser.add_argument("--conversations", type=int, help="conversations of the phase chat")
    parser.add_argument("--rate", type=float, help="conversations of the phase chat that start per second")
    parser.add_argument(
        "--limit", type=float, default=float("inf"), help="seconds after which the run ends with its results"
    )
    parser.add_argument(
        "--start-seconds", type=float, default=150.0, help="seconds in which engines have to be ready"
    )
    parser.add_argument("--engine", default="", metavar="ARGUMENTS", help="more arguments for every engine")
    parser.add_argument("--cpu", action="store_true", help="try it with a tiny model on CPUs")
    plan = parser.parse_args()
    if plan.report:
        lines = [json.loads(line) for file in plan.report for line in file.read_text().splitlines()]
        print(report(lines))
        return
    machine = CPU if plan.cpu else GPU
    if plan.conversations:
        chat = dataclasses.replace(machine.chat, conversations=plan.conversations)
        machine = dataclasses.replace(machine, chat=chat)
    if plan.rate:
        machine = dataclasses.replace(machine, pace=dataclasses.replace(machine.pace, rate=plan.rate))
    plan.work = plan.work.resolve()
    plan.work.mkdir(parents=True, exist_ok=True)
    model = write_tiny(plan.work / "tiny") if plan.cpu else SHAPES["llama"].write(plan.work / "llama")
    write_tokenizer(model)
    os.environ.update(ENVIRONMENT)
    with leave_on_signals(), plan.json.open("a") as sink:
        results = Results(sink)
        run = ConversationRun(
            machine,
            systems(plan, machine, model),
            results,
            limit=plan.limit,
            start_seconds=plan.start_seconds,
        )
        wanted = [one for one in PLAN if one[0] in plan.phases and one[1] in plan.systems]
        if plan.cpu:  # engines start slowly: one system after another
            wanted.sort(key=lambda one: SYSTEMS.index(one[1]))
        try:
            run.run(wanted, ConversationBench(machine, results))
        finally:
            run.end()
            print(report(results.lines))
    if not any(line["kind"] in ("load", "lost") for line in results.lines):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
