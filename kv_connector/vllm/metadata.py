"""Messages between scheduler side and worker side, one each way for each engine step. vLLM pickles them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kv_connector.agent.commands import Command, NewPages
from kv_connector.control.membership import WorkloadReport
from kv_connector.protocol.actions import Address, PrefixRequested
from kv_connector.protocol.wire.messages import Rank
from kv_connector.vllm.internals import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not typed for mypy
    preempted: tuple[str, ...] = ()
    """Transfers whose blocks the scheduler has taken back in this step."""
    commands: tuple[Command, ...] = ()
    """Commands in the order in which the scheduler saw the events."""
    new_pages: tuple[NewPages, ...] = ()
    after_pages: tuple[Command, ...] = ()
    """Commands that follow ``new_pages``."""
    waiting: tuple[tuple[str, Address], ...] | None = None
    """Transfers whose requests still queue at D, with their P. None: no change."""
    contexts: dict[str, Mapping[str, str]] = field(default_factory=dict)
    """Headers of the trace context of each new traced request, by request id."""
    step_requests: str = ""
    """Name of the socket for requests of a step, in the first step. Empty: no change."""
    computes: bool = True
    """Whether a request has tokens to compute in this step. False: the engine only waits for transfers."""
    hits: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """On D: tokens of prompts from P and their local hits, by transfer id, for the routers."""
    load: WorkloadReport | None = None
    """The engine's workload, for the routers. None: no change, or no routers."""


@dataclass
class DescribedRank(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # vLLM is not typed for mypy
    """The description of a worker, with the address to which its control socket is bound."""

    rank: Rank


@dataclass
class News(KVConnectorWorkerMetadata):  # type: ignore[misc]  # vLLM is not typed for mypy
    """News from the workers to their scheduler."""

    reserved: set[str] = field(default_factory=set)
    """On P: transfers for which a D has room."""
    sampled: dict[str, int] = field(default_factory=dict)
    """On D: the token that P sampled behind the prompt, by request id."""
    discarded: set[str] = field(default_factory=set)
    """On D: requests whose pages, if any arrived, must not be used. They compute their prompts locally."""
    requested: list[PrefixRequested] = field(default_factory=list)
    """Prefixes that other engines want to borrow."""
    due: set[str] = field(default_factory=set)
    """On D: deferred transfers that may take blocks now."""
    answers: dict[str, int] = field(default_factory=dict)
    """Number of tokens that other engines lend, or 0, by the transfer id of the question."""

    arrived: dict[str, float] = field(default_factory=dict)
    """Seconds from the reservation of a borrowed prefix to its last page, by transfer id."""

    def aggregate(self, other: News) -> News:
        return News(
            self.reserved | other.reserved,
            self.sampled | other.sampled,
            self.discarded | other.discarded,
            self.requested + other.requested,
            self.due | other.due,
            self.answers | other.answers,
            self.arrived | other.arrived,
        )
