"""Pairs that must not exchange pages. Within a second the client receives the difference and the remedy."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest
from cases import FP8, Side, left_out
from deployment import TIMEOUTS, Client, RefusedCall, assert_quiescent, prompt, wait_logged
from site_of_case import Models, engine_settings_of

from kv_connector.lab.cluster import HOST, EngineProcess, LocalCluster, Role
from kv_connector.lab.free_ports import free_ports

pytestmark = pytest.mark.anyio

AT_ONCE_SECONDS = 1.0


@dataclass(frozen=True)
class Stranger:
    """A D that one of the Ps must refuse, and both sides' values as a regular expression."""

    model: str
    flags: str
    prefill: str
    words: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the connector."""


STRANGERS = {
    "model": Stranger(
        "other", "", "plain", r"model: prefill engine has Llama\S* \S+, decode engine has Llama\S* \S+: "
    ),
    "dtype": Stranger(
        "llama", "--dtype bfloat16", "plain", r"prefill engine has \S*float32.*decode engine has \S*bfloat16"
    ),
    "kv-dtype": Stranger(
        "llama", FP8, "plain", r"prefill engine has \S*float32.*decode engine has \S*float8"
    ),
    "kv-scales": Stranger(
        "fp8-other-scales",
        FP8,
        "scaled",
        r"prefill engine has \S+ times 0\.25.*decode engine has \S+ times 0\.5",
        {"compare_checkpoints": False},
    ),
    "weights": Stranger(
        "llama-retrained",
        "",
        "plain",
        r"weights: prefill engine has checkpoint \w{16}, decode engine has checkpoint \w{16}: start both ",
    ),
}
PREFILLS = {"plain": Stranger("llama", "", "", ""), "scaled": Stranger("fp8-scales", FP8, "", "")}


@dataclass(frozen=True)
class Strangers:
    prefills: dict[str, EngineProcess]
    decodes: dict[str, EngineProcess]
    routers: dict[str, str]


@pytest.fixture(scope="module")
def strangers(
    models: Models, interpreter: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Strangers]:
    directory = tmp_path_factory.mktemp("strangers")
    with ExitStack() as stack:
        clusters: dict[str, LocalCluster] = {}

        ports = dict(zip(STRANGERS, free_ports(len(STRANGERS)), strict=True))

        def start(name: str, role: Role, what: Stranger) -> EngineProcess:
            if what.model not in clusters:
                cluster = LocalCluster(directory / what.model, models[what.model])
                cluster.interpreter = interpreter
                clusters[what.model] = stack.enter_context(cluster)
            return clusters[what.model].start_engine(
                name,
                role=role,
                extra={"timeouts": TIMEOUTS, **what.extra},
                settings=engine_settings_of(Side(what.flags), what.flags.split()),
                routers=[f"{HOST}:{ports[name]}"] if name in ports else [],
            )

        prefills = {
            name: start(name, "kv_producer", what)
            for name, what in PREFILLS.items()
            if not left_out(what.flags)
        }
        decodes = {
            name: start(name, "kv_consumer", what)
            for name, what in STRANGERS.items()
            if not left_out(what.flags)
        }
        routers = {
            name: clusters[what.model].start_router(
                f"router-{name}", prefill=[prefills[what.prefill]], registration=ports[name]
            )
            for name, what in STRANGERS.items()
            if name in decodes
        }
        for cluster in clusters.values():
            cluster.wait_ready()
        yield Strangers(prefills, decodes, routers)


@pytest.mark.parametrize("name", STRANGERS)
async def test_a_pair_that_differs_is_refused(strangers: Strangers, client: Client, name: str) -> None:
    """The refusal comes at once and names both sides' values, as does D's log. Alone, D still serves."""
    if reason := left_out(STRANGERS[name].flags):
        pytest.skip(f"{name}: {reason}")
    decode, prefill = strangers.decodes[name], strangers.prefills[STRANGERS[name].prefill]
    assert re.search(STRANGERS[name].words, (await refusal(client, strangers, name)).text)
    await wait_logged(decode, STRANGERS[name].words)
    await assert_quiescent(client, decode, prefill)
    assert len(await client.complete(decode.url, prompt("alone", 100), 4)) == 4


async def refusal(client: Client, strangers: Strangers, name: str) -> RefusedCall:
    # A first answer is slower.
    await client.complete(strangers.prefills[STRANGERS[name].prefill].url, prompt("warm", 100), 1)
    began = time.monotonic()
    with pytest.raises(RefusedCall) as refused:
        await client.complete(strangers.routers[name], prompt(f"stranger {name}", 100), 4)
    assert time.monotonic() - began < AT_ONCE_SECONDS
    return refused.value
