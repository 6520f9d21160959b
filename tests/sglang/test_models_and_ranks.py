"""Other models, and other ranks on both sides: greedy tokens are one server's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from mla_model import make_mla
from site_of_servers import Client, at_rest, prompts

from kv_connector.lab.model import make_gemma3, make_llama
from kv_connector.lab.sglang_cluster import ServerSettings, SglangCluster

ASKED = prompts(20, seed=9)


@dataclass(frozen=True)
class Case:
    make: Callable[[Path], Path]
    prefill: int = 1
    decode: int = 1
    page_size: int = 1

    @property
    def name(self) -> str:
        kind = self.make.__name__.removeprefix("make_")
        return f"{kind}-tp{self.prefill}-tp{self.decode}-page{self.page_size}"


# SGLang keeps Gemma's windows in one pool with the rest.
CASES = [
    Case(make_llama, prefill=2, page_size=16),
    Case(make_llama, decode=2),
    Case(make_gemma3, page_size=16),
    Case(make_mla),
    Case(make_mla, prefill=2),
]
SETTINGS = ServerSettings(
    chunked_prefill_size=256,
    arguments=("--enable-metrics",),
    environment={"PYTHONPATH": str(Path(__file__).parent / "mla_on_cpu")},
)


class Oracle:
    """One server's tokens for each kind of model, asked once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tokens: dict[str, list[list[int]]] = {}

    def model(self, make: Callable[[Path], Path]) -> Path:
        path = self._directory / make.__name__
        return path if path.exists() else make(path)

    def tokens(self, make: Callable[[Path], Path]) -> list[list[int]]:
        if make.__name__ not in self._tokens:
            directory = self._directory / f"one-{make.__name__}"
            with SglangCluster(directory, self.model(make), SETTINGS) as cluster:
                server = cluster.start_server("one")
                cluster.wait_ready()
                ask = Client().all(server.url, ASKED, at_once=8)
                self._tokens[make.__name__] = asyncio.run(ask)
        return self._tokens[make.__name__]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_tokens_are_one_servers(case: Case, oracle: Oracle, tmp_path: Path) -> None:
    expected = oracle.tokens(case.make)
    assert len({tuple(tokens) for tokens in expected}) > 15

    async def ask() -> None:
        client = Client()
        assert await client.all(router, ASKED) == expected
        assert await client.all(router, ASKED, at_once=8) == expected
        await at_rest(prefill, decode)

    settings = replace(SETTINGS, page_size=case.page_size)
    with SglangCluster(tmp_path, oracle.model(case.make), settings) as cluster:
        prefill = cluster.start_server("prefill", role="prefill", ranks=case.prefill)
        decode = cluster.start_server("decode", role="decode", ranks=case.decode)
        router = cluster.start_router("router", prefill=[prefill], decode=[decode], mini=True)
        cluster.wait_ready()
        asyncio.run(ask())
