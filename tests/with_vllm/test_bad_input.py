"""Wrong configurations, engines that do not fit each other, and garbage on the wire.

Each causes an error with a remedy, and the correct engines continue to serve.
"""

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq
import zmq.asyncio
from deployment import (
    DATA_HOST,
    MODEL_NAME,
    Client,
    ModelDeployment,
    PageCount,
    RefusedCall,
    assert_quiescent,
    completion_body,
    decode_params,
    engine_settings,
    prefill_params,
    prompt,
    wait_logged,
    wait_until,
)
from suite_numbers import whole_of

from kv_connector.lab.cluster import HOST, EngineProcess, LocalCluster
from kv_connector.lab.model import make_llama

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
async def still_serving(deployment: ModelDeployment, client: Client) -> AsyncIterator[None]:
    yield
    assert all(engine.running() for engine in (deployment.prefill, deployment.decode))
    await assert_serves(client, deployment, "after bad input")
    await assert_quiescent(client, deployment.prefill, deployment.decode)


async def assert_serves(client: Client, deployment: ModelDeployment, seed: str) -> None:
    one = prompt(seed, 200)
    count = await PageCount.begin(client, deployment)
    output = await client.complete(deployment.concurrent, one, 4)
    assert output == await client.complete(deployment.plain.url, one, 4)
    assert await count.pages() == deployment.shape.pages(len(one))


# --- Engines that do not start


@pytest.mark.parametrize("deployment", ["llama"], indirect=True)
async def test_wrong_configurations(
    deployment: ModelDeployment,
    client: Client,
    model_directories: dict[str, Path],
    interpreter: tuple[str, ...],
    tmp_path: Path,
) -> None:
    """Each engine ends before it serves, and its log names the setting to change and a valid value."""
    with LocalCluster(tmp_path, model_directories["llama"], engine_settings()) as cluster:
        cluster.interpreter = interpreter
        start = cluster.start_engine
        taken = deployment.prefill.control_port
        # Texts that each log must contain, as regular expressions.
        wrong: dict[EngineProcess, tuple[str, ...]] = {
            start("role", role="kv_prefill"): ("kv_prefill", "kv_producer"),  # type: ignore[arg-type]
            start("provider", role="kv_producer", extra={"providers": ["carrier-pigeon"]}): (
                "carrier-pigeon",
                r"\bhost\b.*\btcp\b|\btcp\b.*\bhost\b",
            ),
            start("key", role="kv_producer", extra={"control_prot": 5600}): ("control_prot", "control_port"),
            start("port", role="kv_producer", control_port=taken): (str(taken), "control_port", "in use"),
        }

        async def running() -> str:
            return ", ".join(engine.name for engine in wrong if engine.running())

        await assert_serves(client, deployment, "while others fail to start")
        await wait_until(running, 180)
        for engine, expected in wrong.items():
            for pattern in expected:
                await wait_logged(engine, pattern)


# --- Engines that do not fit each other

# Text in the decode engine's log for each difference.
REFUSALS = {
    "kv dtype": r"format: prefill engine has 'float32, .*', decode engine has 'float8_e4m3fn .*dtypes",
    "dtype": r"dtype: prefill engine has \S*float32.*, decode engine has \S*bfloat16.*--dtype",
    "model": r"model: prefill engine has Llama\S* \S+, decode engine has Llama\S* \S+: serve the same model",
}


@pytest.fixture
def strangers(
    deployment: ModelDeployment,
    model_directories: dict[str, Path],
    interpreter: tuple[str, ...],
    tmp_path: Path,
) -> Iterator[dict[str, EngineProcess]]:
    """Decode engines that differ from P, by the difference."""
    usual = engine_settings()
    other_model = make_llama(
        tmp_path / "other-model", layers=16, hidden=128, heads=4, kv_heads=2, head_dim=32, intermediate=320
    )
    with (
        LocalCluster(tmp_path, model_directories["llama"], usual) as cluster,
        LocalCluster(tmp_path, other_model, usual) as other,
    ):
        cluster.interpreter = other.interpreter = interpreter
        engines = {
            "dtype": cluster.start_engine(
                "dtype", role="kv_consumer", settings=engine_settings("--dtype", "bfloat16")
            ),
            "model": other.start_engine("model", role="kv_consumer"),
        }
        if torch.cpu._is_avx512_supported():
            engines["kv dtype"] = cluster.start_engine(
                "kv-dtype", role="kv_consumer", settings=engine_settings("--kv-cache-dtype", "fp8")
            )
        cluster.wait_ready()
        other.wait_ready()
        yield engines


@pytest.mark.parametrize("deployment", ["llama"], indirect=True)
async def test_engines_that_do_not_fit(
    deployment: ModelDeployment, client: Client, strangers: dict[str, EngineProcess]
) -> None:
    """P refuses each engine and names the difference. Their requests fail. P and its own D are not
    affected."""
    await asyncio.gather(*(refused_by_prefill(client, deployment, *item) for item in strangers.items()))
    one = prompt("beside strangers", 100)
    output = await client.complete(deployment.concurrent, one, 4)
    assert output == await client.complete(deployment.plain.url, one, 4)
    # A refused engine still serves by itself.
    for stranger in strangers.values():
        assert len(await client.complete(stranger.url, one, 4)) == 4
    if left_out := REFUSALS.keys() - strangers.keys():
        pytest.skip(f"{', '.join(left_out)}: fp8 needs AVX-512; the others are refused as they must be")


async def refused_by_prefill(
    client: Client, deployment: ModelDeployment, what: str, stranger: EngineProcess
) -> None:
    one, transfer = prompt(f"stranger {what}", 100), f"stranger {what}"
    prefilling = asyncio.create_task(
        client.complete(deployment.prefill.url, one, 1, kv_transfer_params=prefill_params(transfer))
    )
    with pytest.raises(RefusedCall) as refused:
        await client.complete(
            stranger.url, one, 4, kv_transfer_params=decode_params(transfer, deployment.prefill)
        )
    assert refused.value.status >= 500
    await prefilling
    await assert_quiescent(client, stranger)
    await wait_logged(stranger, REFUSALS[what])


@pytest.mark.parametrize("deployment", ["llama"], indirect=True)
async def test_decode_engine_named_as_prefill(deployment: ModelDeployment, client: Client) -> None:
    """A router has the two engines the wrong way round."""
    params = decode_params("wrong-way", deployment.decode)
    with pytest.raises(RefusedCall) as refused:
        await client.complete(deployment.decode.url, prompt("wrong way", 100), 4, kv_transfer_params=params)
    assert refused.value.status >= 500
    await wait_logged(
        deployment.decode, "is a decode engine: give the router the address of a prefill engine"
    )


# --- Invalid requests


@pytest.mark.parametrize("deployment", ["llama"], indirect=True)
@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"transfer_id": None}, "transfer_id"),
        ({"transfer_id": "x" * 300}, "transfer.id"),
        ({"remote_host": 7}, "remote_host"),
        ({"remote_port": "5600"}, "remote_port"),
        ({"remote_port": 70000}, "remote_port"),
        ({"do_remote_decode": True}, "do_remote_decode"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
async def test_bad_parameters(
    deployment: ModelDeployment, client: Client, change: dict[str, Any], word: str
) -> None:
    """D computes the prompt itself and logs a warning."""
    one = prompt("bad parameters", 100)
    params = decode_params("bad-parameters", deployment.prefill) | change
    logged = len(deployment.decode.log.read_bytes())
    output = await client.complete(deployment.decode.url, one, 4, kv_transfer_params=params)
    assert output == await client.complete(deployment.plain.url, one, 4)
    await wait_logged(deployment.decode, word, since=logged)


async def test_one_transfer_for_two_prompts(deployment: ModelDeployment, client: Client) -> None:
    """A body with two prompts shares one transfer, and P has only one of them. Neither gets the other
    prompt's pages."""
    ours, other, transfer = prompt("ours", 170), prompt("other", 170), "two-prompts"
    params = decode_params(transfer, deployment.prefill)
    expected = await client.choices(deployment.plain.url, [ours, other], 4)
    prefilling = asyncio.create_task(
        client.complete(deployment.prefill.url, ours, 1, kv_transfer_params=prefill_params(transfer))
    )
    outputs = await client.choices(deployment.decode.url, [ours, other], 4, kv_transfer_params=params)
    assert outputs == expected
    await prefilling


async def test_another_prompt_under_the_same_transfer(deployment: ModelDeployment, client: Client) -> None:
    """D computes its own prompt with any failure policy, and P keeps nothing of its prompt."""
    transfer = "mismatch"
    prefilling = asyncio.create_task(
        client.complete(
            deployment.prefill.url, prompt("on P", 170), 1, kv_transfer_params=prefill_params(transfer)
        )
    )
    theirs = prompt("on D", 170)
    expected = await client.complete(deployment.plain.url, theirs, 4)
    params = decode_params(transfer, deployment.prefill)
    answer = await client.complete(deployment.decode.url, theirs, 4, kv_transfer_params=params)
    assert answer == expected
    await prefilling
    await wait_logged(deployment.decode, r"transfer mismatch.*the prompts differ")


# --- Bodies that the prefill engine accepts and the decode engine refuses

# Requests per body and router. Set KVC_REFUSED_BODIES=40 for a long run.
REFUSED_OF_EACH = whole_of("KVC_REFUSED_BODIES", 3)
# Seconds that a prefill engine holds an unrequested prompt. The suite's setting is the default.
HOLD_SECONDS = 20.0
TOLD = [{"role": "user", "content": "tell me"}]


@pytest.mark.parametrize("deployment", ["llama"], indirect=True)
@pytest.mark.parametrize("dispatch", ["concurrent", "serial", "early"])
async def test_prefill_releases_prompts_that_decode_refuses(
    deployment: ModelDeployment, client: Client, dispatch: str
) -> None:
    """The router shortens the prefill engine's body, so that engine computes a prompt that the decode engine
    refuses."""
    one = completion_body(prompt("refused", 170), 4)
    chat = {"model": MODEL_NAME, "messages": TOLD, "max_tokens": 4}
    refused = [
        ("/v1/completions", one | {"stream_options": {"include_usage": True}}),
        ("/v1/completions", one | {"max_tokens": "lots"}),
        ("/v1/completions", one | {"return_token_ids": "x"}),
        ("/v1/completions", one | {"stream": "maybe"}),
        ("/v1/chat/completions", chat | {"stream_options": {"include_usage": True}}),
        ("/v1/messages", {"model": MODEL_NAME, "messages": TOLD}),
    ]
    router = getattr(deployment, dispatch)
    async with traffic(client, deployment):
        for path, body in refused:
            asked = [client.status(f"{router}{path}", body) for _ in range(REFUSED_OF_EACH)]
            assert {*await asyncio.gather(*asked)} <= {400, 422}, (path, body)
    await assert_quiescent(client, deployment.prefill, deployment.decode, seconds=HOLD_SECONDS / 4)


# --- Garbage on the wire


@asynccontextmanager
async def traffic(client: Client, deployment: ModelDeployment) -> AsyncIterator[None]:
    """Sends requests while the block runs. All must get the right answers."""
    prompts = [prompt(f"traffic {index}", 150 + 97 * index) for index in range(6)]
    expected = await asyncio.gather(*(client.complete(deployment.plain.url, one, 8) for one in prompts))
    running = [asyncio.create_task(client.complete(deployment.concurrent, one, 8)) for one in prompts]
    yield
    assert [await task for task in running] == expected


async def test_garbage_on_the_control_port(deployment: ModelDeployment, client: Client) -> None:
    """Sends over ZMQ: no MessagePack, MessagePack of another kind, and a message of an unknown type. Also a
    message of a known type from an unknown sender, many frames, empty ones, and one above the limit. Then
    bytes that are not ZMQ."""
    noise = random.Random(5)
    frames: list[list[bytes]] = [
        [noise.randbytes(200)],
        [b""],
        [b"", b""],
        [noise.randbytes(10) for _ in range(40)],
        [msgspec.msgpack.encode(["not", "a", "map"])],
        [msgspec.msgpack.encode({"t": "evil", "transfer_id": "x"})],
        [msgspec.msgpack.encode({"t": "cancel", "transfer_id": "x", "attempt": 1})],
        [msgspec.msgpack.encode({"t": "hello", "engine_id": "x" * 300})],
        [b"\x81" * 5000],
        [bytes(5 << 20)],
    ]
    port = deployment.prefill.control_port
    context = zmq.asyncio.Context()
    try:
        async with traffic(client, deployment):
            for parts in frames:
                with context.socket(zmq.DEALER) as dealer:
                    dealer.linger = 0
                    dealer.connect(f"tcp://{HOST}:{port}")
                    # An agent with a key closes connections without it. The message may then remain unsent.
                    with suppress(TimeoutError):
                        await asyncio.wait_for(dealer.send_multipart(parts), 1.0)
                    # Any answer, or none, is allowed: only the sender may be affected.
                    await dealer.poll(50)
            assert port is not None
            send_noise(HOST, [port], noise)
    finally:
        context.destroy(linger=0)


async def test_garbage_on_the_data_ports(deployment: ModelDeployment, client: Client) -> None:
    """Sends bytes to every TCP port on which the data planes of P and D listen."""
    ports = listening_ports(DATA_HOST, deployment.prefill, deployment.decode)
    assert len(ports) == 2
    async with traffic(client, deployment):
        send_noise(DATA_HOST, ports, random.Random(6))


def send_noise(host: str, ports: list[int], noise: random.Random) -> None:
    """Connects to each port, sends noise of several lengths, and disconnects unless the peer does so
    before."""
    for port in ports:
        for length in (0, 1, 64, 4096, 1 << 20):
            with socket.create_connection((host, port), timeout=5) as connection:
                connection.settimeout(0.2)
                try:
                    connection.sendall(noise.randbytes(length))
                    connection.recv(4096)
                except (TimeoutError, ConnectionError):
                    pass  # refused in the middle, or ignored


def listening_ports(host: str, *engines: EngineProcess) -> list[int]:
    """Returns TCP ports where processes of these engines, those that write its log, listen at this
    address."""
    logs = {engine.log.resolve() for engine in engines}
    inodes = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended in the meantime
            if (process / "fd/1").readlink() not in logs:
                continue
            for entry in (process / "fd").iterdir():
                with suppress(OSError):  # closed in the meantime
                    inodes.add(str(entry.readlink()).removeprefix("socket:[").removesuffix("]"))
    address = socket.inet_aton(host)[::-1].hex().upper()
    ports = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        local, state, inode = fields[1], fields[3], fields[9]
        if state == "0A" and local.startswith(address) and inode in inodes:
            ports.append(int(local.rpartition(":")[2], 16))
    return ports
