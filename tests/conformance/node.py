"""Half of a conformance test: one engine and one registered memory, in this process or a separate one."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from kv_connector.engine import DomainConfig, EngineConfig, Handshake, MemoryRange
from kv_connector.engine.convert import buffer_range
from kv_connector.engine.transfer_engine import SharedMemory, TransferEngine

from .gpu import GpuMemory

# Lanes that are tested with GPU memory on both sides.
GPU_PROVIDERS = ("nvlink", "bounce")

# Suffix of a provider in a lane: its GPU memory is in pieces (cuMemCreate), as expandable segments are.
VMM = "-vmm"

# Seconds. Long enough for a loaded machine: a test that needs all of it has failed.
LIMIT = 30.0


@dataclass(frozen=True)
class NodeConfig:
    name: str
    lane: str  # PROVIDER[-vmm][:DEVICE][/WORKERS]
    nbytes: int
    domains: int = 1
    memfd: bool = True  # False: ordinary private memory
    cuda: str | None = None  # for lanes of GPU memory: library of the CUDA driver; None: the machine's


def parts_of(lane: str) -> tuple[str, str, int]:
    """Returns the provider (with its "-vmm"), device and workers of a lane."""
    names, _, workers = lane.partition("/")
    provider, _, device = names.partition(":")
    return provider, device, int(workers or 1)


def provider_of(lane: str) -> str:
    return parts_of(lane)[0].removesuffix(VMM)


def domain_config(lane: str, index: int, name: str = "sender") -> DomainConfig:
    """Returns a domain's configuration. KVC_TEST_DEVICES: NICs of verbs, alternately for sender and
    receivers."""
    provider, device = provider_of(lane), parts_of(lane)[1]
    nics = os.environ.get("KVC_TEST_DEVICES", "").split(",")
    if provider == "verbs" and not device:
        device = nics[(2 * index + (name != "sender")) % len(nics)]
    return DomainConfig(provider, device=device, seed=7 + index)


class Node:
    """An engine with one region. Its public methods can be called across a pipe."""

    def __init__(self, config: NodeConfig) -> None:
        provider, _, workers = parts_of(config.lane)
        domains = [domain_config(config.lane, i, config.name) for i in range(config.domains)]
        engine_config = EngineConfig(config.name, domains, workers=workers)
        self.memory: npt.NDArray[np.uint8] | GpuMemory
        self._gpu: GpuMemory | None = None
        if provider_of(config.lane) in GPU_PROVIDERS:
            # Before the engine, because this loads the driver that the engine then finds.
            device = 0 if config.name == "sender" else 1
            self._gpu = self.memory = GpuMemory(config.nbytes, device, config.cuda, provider.endswith(VMM))
            self._range = MemoryRange(self._gpu.address, config.nbytes)
            self.engine = TransferEngine(engine_config)
            self.region = self.register_again()
            return
        self.engine = TransferEngine(engine_config)
        buffer: Any = SharedMemory(config.name, config.nbytes) if config.memfd else bytearray(config.nbytes)
        self._buffer = buffer
        self._range = buffer_range(buffer)
        self.memory = np.frombuffer(buffer, dtype=np.uint8)
        self.region = self.register_again()

    def register_again(self) -> int:
        """Registers its memory again after it was deregistered."""
        (self.region,) = self.engine.register_ranges([self._range])
        return self.region

    def part(self, offset: int, nbytes: int) -> MemoryRange:
        """Returns a range of its memory."""
        whole = self._range
        return MemoryRange(whole.address + offset, nbytes, whole.memfd, offset)

    def register_parts(self, offsets: list[int], nbytes: int) -> list[int]:
        """Registers regions of `nbytes` bytes each in its memory, in one call."""
        return self.engine.register_ranges([self.part(offset, nbytes) for offset in offsets])

    def fill(self, seed: int) -> None:
        self.memory[:] = np.random.default_rng(seed).integers(0, 256, self.memory.size, dtype=np.uint8)

    def zero(self) -> None:
        self.memory[:] = 0

    def read(self, offset: int = 0, nbytes: int | None = None) -> bytes:
        return self.memory[offset : None if nbytes is None else offset + nbytes].tobytes()

    def engine_call(self, method: str, *arguments: Any) -> Any:
        return getattr(self.engine, method)(*arguments)

    def close(self) -> None:
        self.engine.close()
        if self._gpu is not None:
            self._gpu.free()


def _serve(pipe: Connection) -> None:
    """Opens one node after another, and answers calls to the open one."""
    # Ctrl-C in the terminal is meant for the test process, which closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    node: Node | None = None
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            break
        try:
            if method == "open":
                node = Node(*arguments)
                value: Any = node.region
            else:
                value = getattr(node, method)(*arguments)
            pipe.send((True, value))
        except Exception as error:
            pipe.send((False, error))


class Process:
    """A process that opens nodes, one at a time.

    It serves many tests, because its start takes most of a second.
    """

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), name="receiver", daemon=True)
        self._process.start()
        theirs.close()

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def call(self, method: str, *arguments: Any) -> Any:
        self._pipe.send((method, arguments))
        if not self._pipe.poll(LIMIT):
            raise TimeoutError(f"the receiver's process does not answer to {method}")
        ok, value = self._pipe.recv()
        if not ok:
            raise value
        return value

    def kill(self) -> None:
        """Kills the process, like an OOM killer or a power cut of the peer's machine."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.join(LIMIT)

    def stop(self) -> None:
        self._pipe.close()
        self._process.join(LIMIT)
        if self._process.exitcode is None:
            self.kill()
            raise TimeoutError("the receiver's process did not end by itself")


class NodeProcess:
    """A Node in another process. Calls block until it has answered."""

    def __init__(self, config: NodeConfig, process: Process) -> None:
        self._process = process
        self.region: int = process.call("open", config)

    def call(self, method: str, *arguments: Any) -> Any:
        return self._process.call(method, *arguments)

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        if self._process.alive:
            self._process.call("close")


class LocalNode:
    """A Node in this process with the same calls, for the sim fabric, which does not reach other
    processes."""

    def __init__(self, config: NodeConfig) -> None:
        self._node = Node(config)
        self.region = self._node.region

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self._node, method)(*arguments)

    def kill(self) -> None:
        self._node.close()  # the closest to a kill within one process

    def close(self) -> None:
        self._node.close()


Receiver = NodeProcess | LocalNode


@dataclass
class Pair:
    """A sender in this process, connected to a receiver."""

    sender: Node
    receiver: Receiver
    to_receiver: int
    to_sender: int
    receiver_region: int  # the sender's id of it
    sender_region: int  # the receiver's id of it

    @property
    def engine(self) -> TransferEngine:
        return self.sender.engine

    def at_receiver(self, method: str, *arguments: Any) -> Any:
        """Calls an engine method of the receiver."""
        return self.receiver.call("engine_call", method, *arguments)

    def counter(self, target: int) -> tuple[int, int]:
        """Returns a counter set of the receiver with a target, and the immediate that raises it."""
        counters = self.at_receiver("alloc_counters", 1)
        self.at_receiver("expect", counters.id, [target])
        return counters.id, counters.immediates[0]

    def await_counters(self, counters: int) -> None:
        self.at_receiver("wait_counters", counters, LIMIT)


def connect(sender: Node, receiver: Receiver, name: str) -> Pair:
    offer = sender.engine.offer(name)
    answer: Handshake = receiver.call("engine_call", "accept", sender.engine.config.name, offer.data)
    sender.engine.complete(offer.peer, answer.data)
    theirs: bytes = receiver.call("engine_call", "region_descriptor", receiver.region)
    ours = sender.engine.region_descriptor(sender.region)
    return Pair(
        sender,
        receiver,
        offer.peer,
        answer.peer,
        sender.engine.import_region(offer.peer, theirs),
        receiver.call("engine_call", "import_region", answer.peer, ours),
    )


NewPair = Callable[..., Pair]
NewReceiver = Callable[..., Receiver]
