"""What the two halves of the connector tell each other, once per engine step. Pickled by vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kv_connector.agent.commands import Command, NewPages
from kv_connector.control.membership import WorkloadReport
from kv_connector.protocol.actions import Address
from kv_connector.protocol.messages import Rank
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
    """In the order in which the scheduler saw the events."""
    new_pages: tuple[NewPages, ...] = ()
    waiting: tuple[tuple[str, Address], ...] | None = None
    """Transfers whose requests still queue at D, with their P. None: as before."""
    contexts: dict[str, Mapping[str, str]] = field(default_factory=dict)
    """Of new requests that are traced, by id: the headers of their trace's context."""
    computes: bool = True
    """False: no request has a token to compute in this step; the engine only waits for transfers."""
    load: WorkloadReport | None = None
    """For the routers. None: as before, or there are none."""


@dataclass
class DescribedRank(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # vLLM is not typed for mypy
    """A worker, from where its control socket really is bound."""

    rank: Rank


@dataclass
class News(KVConnectorWorkerMetadata):  # type: ignore[misc]  # vLLM is not typed for mypy
    """From the workers to their scheduler."""

    reserved: set[str] = field(default_factory=set)
    """On P: transfers for which a D has room."""
    sampled: dict[str, int] = field(default_factory=dict)
    """On D: by request id, the token that P sampled behind the prompt."""
    discarded: set[str] = field(default_factory=set)
    """On D: requests whose pages, if any came, are not to be used: they compute their prompts here."""

    def aggregate(self, other: News) -> News:
        return News(
            self.reserved | other.reserved, self.sampled | other.sampled, self.discarded | other.discarded
        )
