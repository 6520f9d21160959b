"""AgentConfig: the configuration of one worker's agent, and how its transfer engine is opened."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass, field

import zmq

from kv_connector.control.cluster_key import ClusterKey
from kv_connector.engine import EngineConfig, TransferError
from kv_connector.engine.rank_placement import domains_of
from kv_connector.engine.transfer_engine import TransferEngine
from kv_connector.protocol.actions import Address
from kv_connector.protocol.pages.layout import KvLayout
from kv_connector.protocol.session.checkpoint import Checkpoint
from kv_connector.protocol.timeouts import Timeouts
from kv_connector.protocol.wire.messages import Fingerprint, Role


class AgentError(RuntimeError):
    """The agent cannot start; the message says what to change."""


@dataclass(frozen=True)
class AgentConfig:
    """The configuration of one worker's agent."""

    engine_id: str
    role: Role
    rank: int
    ranks: int  # number of this engine's ranks; if it is 1, set_ranks() need not be called
    stage: int = field(default=0, kw_only=True)  # of the pipeline
    address: Address  # of the control socket; port 0 takes a free port
    fingerprint: Fingerprint
    layout: KvLayout
    checkpoint: Checkpoint | None = None  # that the engine was started from; None: unknown
    # what to do about a difference, by the name of a pair of the fingerprint
    advice: Mapping[str, str] = field(default_factory=dict)
    providers: tuple[str, ...] = ("host", "tcp")  # in order of preference
    allow_fallback: bool = False
    data_host: str = ""  # address that the providers' listeners bind; empty: the control socket's
    spin_us: int | None = None  # how long an idle transfer thread polls; None: the transfer engine's default
    # whether a CUDA stream computes the pages; its context must be current where the agent is created
    on_gpu: bool = False
    nics: Mapping[str, tuple[str, ...]] = field(
        default_factory=dict
    )  # of a provider; a provider without an entry chooses by itself
    worker_cpu: int | None = None  # the core that the transfer thread is pinned to
    timeouts: Timeouts = field(default_factory=Timeouts)
    key: ClusterKey | None = None  # the cluster key; None: any process that reaches the port is accepted
    verify_pages: bool = False  # compare received pages with the prefill engine's
    timelines: int = 0  # number of transfers whose timelines are kept


@dataclass(frozen=True)
class PageMemory:
    """Memory that holds KV pages, one range for each region of the layout. It must stay mapped until close(),
    except between unregister_memory() and register_memory()."""

    address: int
    nbytes: int


def open_engine(config: AgentConfig) -> TransferEngine:
    """Opens the transfer engine with the configured lanes. Raises AgentError."""
    domains = domains_of(config.providers, config.data_host or config.address.host, config.nics)
    options = {} if config.spin_us is None else {"spin_us": config.spin_us}
    name = f"{config.engine_id}/{config.rank}"
    try:
        return TransferEngine(
            EngineConfig(
                name=name,
                domains=domains,
                allow_fallback=config.allow_fallback,
                worker_cpu=config.worker_cpu,
                **options,
            )
        )
    except TransferError as error:
        raise AgentError(
            f"{name}: cannot open the transfer engine with providers {', '.join(config.providers)}: {error}"
        ) from error


def bind_problem(config: AgentConfig, error: zmq.ZMQError) -> str:
    """The reason why the control socket cannot be bound, and the setting to change."""
    where = f"{config.engine_id}/{config.rank}: cannot listen on {config.address}"
    if error.errno == errno.EADDRINUSE:
        return (
            f"{where}: the port is in use. Set control_port to a free one (rank r takes control_port plus r)."
        )
    if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
        return (
            f"{where}: this machine has no such address. Set control_host to one that it has. If the engine "
            f"spans several machines, leave control_host out and set VLLM_HOST_IP, or SGLANG_HOST_IP, on "
            f"each."
        )
    return f"{where}: {error}. Check control_host and control_port."
