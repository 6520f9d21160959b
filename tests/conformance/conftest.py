"""Runs the conformance list over every lane: sim in one process, the others between two.

KVC_TEST_PROVIDERS names other lanes, as PROVIDER[:DEVICE][/WORKERS] with commas between, for machines that
have them. With "-vmm" behind it, a provider of GPU memory gets this memory in pieces (cuMemCreate). "/3" is
the same lane in engines of three workers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kv_connector.engine import EngineConfig, TransferError
from kv_connector.engine.transfer_engine import TransferEngine

from . import gpu
from .node import (
    GPU_PROVIDERS,
    LocalNode,
    NewPair,
    NewReceiver,
    Node,
    NodeConfig,
    NodeProcess,
    Pair,
    Process,
    Receiver,
    connect,
    domain_config,
    provider_of,
)

# With buffer sizes chosen by the kernel, libfabric's "sockets" sometimes stalls (docs/architecture/lanes.md).
os.environ.setdefault("FI_SOCKETS_MAX_BUF_SZ", "4194304")

LANES = os.environ.get(
    "KVC_TEST_PROVIDERS", "sim,host,tcp,nvlink,nvlink-vmm,bounce,sim/3,host/3,tcp/3,nvlink/3"
).split(",")


@pytest.fixture(scope="session")
def stand_in_driver(tmp_path_factory: pytest.TempPathFactory) -> str | None:
    """Loads the CUDA driver's stand-in into this process if the machine has no GPU."""
    if gpu.real_driver():
        return None
    library = gpu.build_stand_in(tmp_path_factory.mktemp("cuda"))
    gpu.load(library)
    return library


@pytest.fixture
def cuda(request: pytest.FixtureRequest, provider: str) -> str | None:
    """Returns NodeConfig.cuda for this provider."""
    if provider not in GPU_PROVIDERS:
        return None
    library: str | None = request.getfixturevalue("stand_in_driver")
    return library


@pytest.fixture(params=LANES)
def lane(request: pytest.FixtureRequest) -> str:
    """Returns PROVIDER[-vmm][:DEVICE][/WORKERS]."""
    name: str = request.param
    if provider_of(name) in GPU_PROVIDERS:
        request.getfixturevalue("stand_in_driver")
    try:
        TransferEngine(EngineConfig("probe", [domain_config(name, 0)])).close()
    except TransferError as error:
        pytest.skip(f"{name} is not usable on this machine: {error}")
    return name


@pytest.fixture
def provider(lane: str) -> str:
    return provider_of(lane)


@pytest.fixture(scope="session")
def processes() -> Iterator[list[Process]]:
    """Processes that no test uses at the moment."""
    idle: list[Process] = []
    yield idle
    for process in idle:
        process.stop()


@pytest.fixture
def new_receiver(lane: str, cuda: str | None, processes: list[Process]) -> Iterator[NewReceiver]:
    """Yields new_receiver(name, nbytes, domains, memfd) -> Receiver; closed after the test."""
    with ExitStack() as stack:

        def new(name: str = "receiver", nbytes: int = 4096, domains: int = 1, memfd: bool = True) -> Receiver:
            config = NodeConfig(name, lane, nbytes, domains, memfd, cuda)
            if provider_of(lane) == "sim":
                node: Receiver = LocalNode(config)
            else:
                process = processes.pop() if processes else Process()
                stack.callback(lambda: processes.append(process) if process.alive else process.stop())
                node = NodeProcess(config, process)
            stack.callback(node.close)
            return node

        yield new


@pytest.fixture
def new_pair(lane: str, cuda: str | None, new_receiver: NewReceiver) -> Iterator[NewPair]:
    """Yields new_pair(nbytes, sender_domains, receiver_domains, memfd) -> Pair; closed after the test."""
    with ExitStack() as stack:

        def new(
            nbytes: int = 4096, sender_domains: int = 1, receiver_domains: int = 1, memfd: bool = True
        ) -> Pair:
            sender = Node(NodeConfig("sender", lane, nbytes, sender_domains, memfd, cuda))
            stack.callback(sender.close)
            return connect(sender, new_receiver("receiver", nbytes, receiver_domains, memfd), "receiver")

        yield new


@pytest.fixture
def members(new_pair: NewPair, new_receiver: NewReceiver) -> list[Pair]:
    """Returns one sender, connected to each of three receivers."""
    first = new_pair(nbytes=8192)
    return [
        first,
        *(connect(first.sender, new_receiver(name, 8192), name) for name in ("receiver-1", "receiver-2")),
    ]
