"""The engines of the suite: two prefill and two decode engines of one kind of model behind a router."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
from deployment import (
    BLOCK,
    SMALL,
    TIMEOUTS,
    Client,
    assert_quiescent,
    engine_settings,
    prefill_settings,
)
from kinds import MLA, make_deepseek_v2, make_gemma3, make_granite, make_llama

from kv_connector.lab.cluster import HOST, EngineProcess, EngineSettings, LocalCluster
from kv_connector.lab.free_ports import free_ports

NAMES = ("p0", "p1", "d0", "d1")


@dataclass(frozen=True)
class Kind:
    """A kind of model. The pools of both sides are too small for all conversations, so engines evict."""

    model: Callable[[Path], Any]
    prefill: EngineSettings
    decode: EngineSettings
    longest: int = 1200
    """Most tokens of a prompt and its answer."""
    lends: bool = True
    """Whether engines lend prefixes. vLLM's CPU kernels have no prefix caching for MLA and Mamba2."""


def _counted(settings: EngineSettings) -> EngineSettings:
    """Makes an engine's usage count the cached tokens."""
    return replace(settings, arguments=(*settings.arguments, "--enable-prompt-tokens-details"))


def _llama(directory: Path) -> Path:
    return make_llama(directory, layers=4, **SMALL)


def _gemma3(directory: Path) -> Path:
    return make_gemma3(directory, sliding_window=128, **SMALL)


def _uncached(*arguments: str, **more: Any) -> dict[str, Any]:
    settings = replace(_counted(engine_settings(*arguments)), prefix_caching=False, **more)
    return {"prefill": settings, "decode": settings, "lends": False}


KINDS: Mapping[str, Kind] = {
    "llama": Kind(_llama, _counted(prefill_settings(blocks=100)), _counted(engine_settings(blocks=80))),
    # By default vLLM keeps the windows of prompts alone in its prefix cache, so no answer could be lent.
    "gemma3": Kind(
        _gemma3,
        _counted(prefill_settings(blocks=150)),
        _counted(engine_settings("--prefix-cache-retention-interval", str(BLOCK), blocks=130)),
    ),
    # The kernel computes whole prompts only.
    "mla": Kind(
        make_deepseek_v2,
        longest=900,
        **_uncached(*MLA.split(), block_size=16, max_batched_tokens=1024, max_model_len=1024),
    ),
    "granite": Kind(make_granite, **_uncached(max_batched_tokens=256)),
}


@dataclass
class Fleet:
    cluster: LocalCluster
    kind: Kind
    engines: dict[str, EngineProcess] = field(default_factory=dict)
    router: str = ""
    _ended: Counter[str] = field(default_factory=Counter)
    """Lent prefixes of engines that were killed, by role."""

    def start(self) -> None:
        """Starts the engines and the router, and waits until all serve."""
        (registration,) = free_ports(1)
        self.router = self.cluster.start_router("router", registration=registration)
        for name in NAMES:
            prefill = name.startswith("p")
            self.engines[name] = self.cluster.start_engine(
                name,
                role="kv_producer" if prefill else "kv_consumer",
                routers=[f"{HOST}:{registration}"],
                extra={"providers": ["host", "tcp"], "timeouts": TIMEOUTS},
                settings=self.kind.prefill if prefill else self.kind.decode,
            )
        self.cluster.wait_ready()
        self.cluster.wait_joined(self.router, *self.engines.values())

    async def kill_and_restart(self, name: str) -> None:
        """Kills an engine with SIGKILL and starts it again at its addresses. Returns once it takes
        requests."""
        engine = self.engines[name]
        self._ended.update(await asyncio.to_thread(self._lent_by, name))
        again = self.engines[name] = self.cluster.restart(engine)
        await asyncio.to_thread(self.cluster.wait_ready, again)
        await asyncio.to_thread(self.cluster.wait_joined, self.router, again)

    def lent(self) -> Counter[str]:
        """Returns the number of lent prefixes by the lenders' role, "p" or "d"."""
        return sum((self._lent_by(name) for name in self.engines), self._ended)

    def _lent_by(self, name: str) -> Counter[str]:
        samples = self.engines[name].samples("kv_connector_prefix_requests_total")
        of_lenders = (
            value for labels, value in samples if (labels["side"], labels["outcome"]) == ("lend", "lent")
        )
        return Counter({name[0]: int(sum(of_lenders))})

    def prefetched(self) -> Counter[str]:
        """Returns the router's prefetches by outcome."""
        found: Counter[str] = Counter()
        for line in httpx.get(f"{self.router}/metrics", trust_env=False).text.splitlines():
            if line.startswith("kv_connector_router_answer_prefetches_total{"):
                found[line.split('"')[1]] = int(float(line.rpartition(" ")[2]))
        return found

    def prompt_tokens(self, role: str) -> Counter[str]:
        """Returns the prompt tokens of all engines of a role by source."""
        found: Counter[str] = Counter()
        for name, engine in self.engines.items():
            if name.startswith(role):
                for labels, value in engine.samples("vllm:prompt_tokens_by_source_total"):
                    found[labels["source"]] += int(value)
        return found

    async def assert_at_rest(self, client: Client) -> None:
        """Checks that every block of every engine is free, and that no request is left."""
        await assert_quiescent(client, *self.engines.values(), seconds=120)
