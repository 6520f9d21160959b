"""Starts one worker's agent with its placement, metrics and registration, from the operator's settings."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from kv_connector.agent.agent import Agent
from kv_connector.agent.config import AgentConfig, PageMemory
from kv_connector.agent.metrics import AgentReporter, activity
from kv_connector.agent.settings import AgentSettings, SettingsError
from kv_connector.control.cluster_key import ClusterKey
from kv_connector.control.membership import Activity, Register, WorkloadReport
from kv_connector.control.moriio_announcer import Announcement, AnnouncementError, MoriioAnnouncer
from kv_connector.control.registrar import Registrar
from kv_connector.engine.rank_placement import Device, place
from kv_connector.protocol.actions import Address
from kv_connector.protocol.pages.layout import KvLayout
from kv_connector.protocol.session.checkpoint import Checkpoint
from kv_connector.protocol.wire.messages import Fingerprint, Role

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerInfo:
    """One worker of an engine, as its framework knows it."""

    engine_id: str
    role: Role
    rank: int
    ranks: int
    """Number of workers of this engine."""
    stage: int
    """Pipeline stage of the worker."""
    data_parallel_index: int
    """Index of this engine among those that share ``control_port``."""
    data_parallel_rank: int
    """Rank by which this engine's API server addresses it."""
    host: str
    """The framework's own address on this host."""
    device: Device
    compute_threads: int
    """Threads with which this process computes, if its device is a CPU."""
    layout: KvLayout
    memory: Sequence[PageMemory]
    fingerprint: Fingerprint
    advice: Mapping[str, str]
    """Advice to the operator about a differing pair of the fingerprint."""
    checkpoint: Checkpoint | None = None
    """The checkpoint that the engine was started from. None: unknown."""
    early_tokens: bool = False
    """Same meaning as in Register, like the next fields."""
    load: WorkloadReport | None = None
    prefixes: str = ""
    borrows: bool = False
    prefetches: bool = False
    keeps_answers: bool = True


@dataclass(frozen=True)
class RunningAgent:
    agent: Agent
    address: Address
    """The address at which the agent listens."""
    reporter: AgentReporter
    registrar: Registrar | None
    """The registration with the routers, on rank 0 and if routers are configured."""
    _resources: ExitStack

    def sleep(self) -> None:
        """Prepares for the memory to be unmapped. BLOCKS. Raises AgentError if it must stay mapped."""
        self.agent.unregister_memory()
        if self.registrar is not None:
            self.registrar.set_asleep(True)

    def wake(self) -> None:
        """Uses the memory again, which is mapped at its old addresses. BLOCKS. Raises AgentError."""
        self.agent.register_memory()
        if self.registrar is not None:
            self.registrar.set_asleep(False)

    def set_weights(self, version: str, *, of_checkpoint: bool = False) -> None:
        """Does the same as Agent.set_weights(), and reports the version to the routers."""
        self.agent.set_weights(version, of_checkpoint=of_checkpoint)
        if self.registrar is not None:
            self.registrar.set_weights(version, of_checkpoint=of_checkpoint)

    def forget_checkpoint(self) -> None:
        """Does the same as Agent.forget_checkpoint(), and reports it to the routers."""
        self.agent.forget_checkpoint()
        if self.registrar is not None:
            self.registrar.forget_checkpoint()

    def close(self) -> None:
        """Ends the sessions with the routers, then those with the peers. BLOCKS as Agent.close(). A second
        call does nothing."""
        self._resources.close()


def start(settings: AgentSettings, worker: WorkerInfo) -> RunningAgent:
    """Opens the lanes and the control socket, and registers with the routers.

    Raises SettingsError or AgentError, with a message that says what to change. Nothing is left open in that
    case.
    """
    settings = settings.for_device(worker.device.kind)
    settings.check_ranks(worker.ranks)
    key = settings.key()
    host = settings.host(worker.host, key)
    port = settings.port(data_parallel_index=worker.data_parallel_index, ranks=worker.ranks, rank=worker.rank)
    if key is None:
        logger.warning(
            "NO CLUSTER KEY: any process that reaches the control socket on %s can read and write this "
            "engine's KV cache. Set control_key_file.",
            host,
        )
    with ExitStack() as resources:
        placement = place(
            worker.device,
            providers=settings.providers,
            nics=settings.nics_of(worker.rank),
            worker_cpu=settings.worker_cpu_of(worker.rank),
            compute_threads=worker.compute_threads,
        )
        resources.callback(placement.release)
        agent = Agent(
            AgentConfig(
                engine_id=worker.engine_id,
                role=worker.role,
                rank=worker.rank,
                ranks=worker.ranks,
                stage=worker.stage,
                address=Address(host, port),
                providers=settings.providers,
                allow_fallback=settings.allow_fallback,
                data_host=settings.data_host or host,
                spin_us=settings.spin_us,
                nics=placement.nics,
                worker_cpu=placement.worker_cpu,
                fingerprint=worker.fingerprint,
                advice=worker.advice,
                checkpoint=worker.checkpoint,
                layout=worker.layout,
                timeouts=settings.agent_timeouts(),
                verify_pages=settings.verify_pages,
                timelines=settings.timelines,
                key=key,
                on_gpu=worker.device.kind == "cuda",
            ),
            worker.memory,
        )
        resources.callback(agent.close)
        address = agent.start()
        registrar = None
        if worker.rank == 0 and (settings.routers or settings.announce):
            registrar = _register(settings, worker, address, key, lambda: activity(agent))
            agent.report_failures(registrar.load_failed)
            resources.callback(registrar.close)
        return RunningAgent(agent, address, AgentReporter(agent, worker.rank), registrar, resources.pop_all())


def _register(
    settings: AgentSettings,
    worker: WorkerInfo,
    address: Address,
    key: ClusterKey | None,
    activity: Callable[[], Activity],
) -> Registrar:
    """Registers this engine with the routers, until the Registrar is closed."""
    assert settings.api_url is not None
    registration = Register(
        engine_id=worker.engine_id,
        incarnation=uuid.uuid4().hex,
        role=worker.role,
        url=settings.api_url,
        control_host=address.host,
        control_port=address.port,
        rank=worker.data_parallel_rank,
        early_tokens=worker.early_tokens,
        load=worker.load,
        prefixes=worker.prefixes,
        borrows=worker.borrows,
        prefetches=worker.prefetches,
        keeps_answers=worker.keeps_answers,
        checkpoint=worker.checkpoint,
    )
    announcer = _announcer(settings, registration) if settings.announce else None
    return Registrar(registration, settings.router_addresses(), key, activity, announcer)


def _announcer(settings: AgentSettings, registration: Register) -> MoriioAnnouncer:
    try:
        announcement = Announcement.of(registration)
    except AnnouncementError as error:
        raise SettingsError(f"announce: {error}") from None
    logger.warning(
        "ANNOUNCED WITHOUT A KEY to %s: vllm-router accepts any process that reaches that port as an engine "
        "and sends it prompts. The cluster key still protects the KV cache.",
        ", ".join(settings.announce),
    )
    return MoriioAnnouncer(announcement, settings.announce_addresses())
