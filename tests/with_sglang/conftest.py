"""Tests against SGLang itself: `make test-sglang`, in a separate environment. Environments without SGLang,
such as vLLM's, collect none of them.

Most of their time goes into starts of servers, so servers are shared. One server that prefills and decodes by
itself serves all tests. A P and a D serve all tests with the same page size.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from site_of_servers import ARGUMENTS, Client, Pair, taking_weights

from kv_connector.lab.model import make_llama
from kv_connector.lab.sglang_cluster import ServerSettings, SglangCluster, SglangServer

collect_ignore_glob = [] if importlib.util.find_spec("sglang") else ["*.py"]

SETTINGS = ServerSettings(arguments=ARGUMENTS)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture(scope="session")
def cluster(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangCluster]:
    """A cluster of shared servers."""
    with SglangCluster(tmp_path_factory.mktemp("servers"), llama, SETTINGS) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def one(cluster: SglangCluster) -> SglangServer:
    """A server that prefills and decodes by itself. Its answers are the right ones for P and D. It starts
    beside a pair, and is ready once the pair is."""
    return cluster.start_server("one")


@pytest.fixture(scope="session", params=["page1", "page16"])
def pair(request: pytest.FixtureRequest, cluster: SglangCluster, one: SglangServer) -> Iterator[Pair]:
    """A P and a D. page1: they take weights. page16: with prompts in chunks, and with a prefix cache at D
    too."""
    takes: list[str] = []
    if request.param == "page1":
        (settings, prefill_takes), (decode_settings, decode_takes) = (
            taking_weights(SETTINGS) for _ in range(2)
        )
        takes = [prefill_takes, decode_takes]
    else:
        settings = replace(SETTINGS, page_size=16, chunked_prefill_size=128)
        more = (*settings.arguments, "--disaggregation-decode-enable-radix-cache")
        decode_settings = replace(settings, arguments=more)
    pair = Pair(
        cluster,
        settings,
        cluster.start_server(f"{request.param}-prefill", role="prefill", settings=settings),
        cluster.start_server(f"{request.param}-decode", role="decode", settings=decode_settings),
        takes,
    )
    cluster.wait_ready(one, pair.prefill, pair.decode)
    yield pair
    cluster.stop(pair.prefill)
    cluster.stop(pair.decode)


@pytest.fixture
async def client(anyio_backend: str) -> Client:
    return Client()
