"""Other models, and other ranks on both sides: the greedy tokens are those of one server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from mla_model import make_mla
from site_of_servers import ARGUMENTS, Client, Pair, at_rest, prompts

from kv_connector.lab.model import make_gemma3
from kv_connector.lab.sglang_cluster import ServerSettings, SglangCluster, SglangServer

ASKED = prompts(20, seed=9)
SETTINGS = ServerSettings(
    chunked_prefill_size=256,
    arguments=ARGUMENTS,
    environment={"PYTHONPATH": str(Path(__file__).parent / "mla_on_cpu")},
)


async def same_tokens(one: SglangServer, prefills: Sequence[SglangServer], decode: SglangServer) -> None:
    """Checks each P with the one D."""
    client = Client()
    expected = await client.all(one.url, ASKED, at_once=8)
    assert len({tuple(tokens) for tokens in expected}) > 15
    for prefill in prefills:
        assert await client.all_of_both(prefill, decode, ASKED) == expected
        assert await client.all_of_both(prefill, decode, ASKED, at_once=8) == expected
        await at_rest(prefill, decode)


@pytest.mark.parametrize("pair", ["page16"], indirect=True)
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_two_ranks_on_one_side(pair: Pair, one: SglangServer, side: str) -> None:
    role = "prefill" if side == "prefill" else "decode"
    two = pair.cluster.start_server(f"two-ranks-{side}", role=role, ranks=2, settings=pair.settings)
    pair.cluster.wait_ready(two)
    if side == "prefill":
        asyncio.run(same_tokens(one, [two], pair.decode))
    else:
        asyncio.run(same_tokens(one, [pair.prefill], two))
    pair.cluster.stop(two)


@pytest.mark.parametrize("pair", ["page16"], indirect=True)
def test_a_pipeline_of_two_stages_at_prefill(pair: Pair, one: SglangServer) -> None:
    settings = replace(
        pair.settings,
        arguments=(*ARGUMENTS, "--pp-size", "2"),
        environment={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
    )
    two = pair.cluster.start_server("two-stages", role="prefill", settings=settings)
    pair.cluster.wait_ready(two)
    asyncio.run(same_tokens(one, [two], pair.decode))
    pair.cluster.stop(two)


# SGLang keeps Gemma's windows in one pool with the rest. One of an MLA model's two ranks has nothing to send.
@pytest.mark.parametrize(
    ("make", "page_size", "ranks_of_prefill"),
    [pytest.param(make_gemma3, 16, (1,), id="gemma3"), pytest.param(make_mla, 1, (1, 2), id="mla")],
)
def test_models(
    make: Callable[[Path], Path], page_size: int, ranks_of_prefill: Sequence[int], tmp_path: Path
) -> None:
    settings = replace(SETTINGS, page_size=page_size)
    with SglangCluster(tmp_path, make(tmp_path / "model"), settings) as cluster:
        one = cluster.start_server("one", settings=SETTINGS)
        prefills = [
            cluster.start_server(f"prefill-of-{ranks}", role="prefill", ranks=ranks)
            for ranks in ranks_of_prefill
        ]
        decode = cluster.start_server("decode", role="decode")
        cluster.wait_ready()
        asyncio.run(same_tokens(one, prefills, decode))
