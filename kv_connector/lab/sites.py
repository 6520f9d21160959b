"""The engines of the demo: vLLM engines, or SGLang servers, on this machine's CPUs."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from kv_connector.agent.settings import SETTINGS_VARIABLE
from kv_connector.lab.cluster import EngineSettings, LocalCluster
from kv_connector.lab.completion import complete, generate
from kv_connector.lab.demonstration import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    LAYERS,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    Site,
)
from kv_connector.lab.sglang_cluster import ServerSettings, SglangCluster

LONGEST = max(PROMPT_TOKENS) + OUTPUT_TOKENS


@contextlib.contextmanager
def vllm_site(directory: Path, model: Path, provider: str | None) -> Iterator[Site]:
    """Yields ready vLLM engines. StartError: an engine does not start."""
    settings = EngineSettings(max_model_len=LONGEST, max_batched_tokens=CHUNK_TOKENS, block_size=BLOCK_TOKENS)
    extra = {"providers": [provider]} if provider else {}
    with LocalCluster(directory, model, settings) as cluster:
        prefill = cluster.start_engine("prefill", role="kv_producer", extra=extra)
        decode = cluster.start_engine("decode", role="kv_consumer", extra=extra)
        alone = cluster.start_engine("alone")
        cluster.wait_ready()
        router = cluster.start_router("router", prefill=[prefill], decode=[decode])
        cluster.wait_ready()
        yield Site(prefill, alone.url, router, complete, lambda tokens: LAYERS * -(-tokens // BLOCK_TOKENS))


@contextlib.contextmanager
def sglang_site(directory: Path, model: Path, provider: str | None) -> Iterator[Site]:
    """Yields ready SGLang servers. StartError: a server does not start."""
    environment = {} if provider is None else {SETTINGS_VARIABLE: json.dumps({"providers": [provider]})}
    settings = ServerSettings(
        page_size=BLOCK_TOKENS,
        chunked_prefill_size=CHUNK_TOKENS,
        arguments=("--enable-metrics", "--sleep-on-idle"),
        environment=environment,
    )
    with SglangCluster(directory, model, settings) as cluster:
        prefill = cluster.start_server("prefill", role="prefill")
        decode = cluster.start_server("decode", role="decode")
        alone = cluster.start_server("alone")
        cluster.wait_ready()
        router = cluster.start_router("router", prefill=[prefill], decode=[decode], mini=True)
        cluster.wait_ready()
        # K and V are separate, and each prompt has a row of metadata.
        yield Site(
            prefill, alone.url, router, generate, lambda tokens: 2 * LAYERS * -(-tokens // BLOCK_TOKENS) + 1
        )
