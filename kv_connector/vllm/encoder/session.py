"""The configuration of both sides of a session, and the fences that end one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kv_connector.control.cluster_key import ClusterKey
from kv_connector.engine import EngineConfig, ErrorCode, TransferError
from kv_connector.engine.rank_placement import domains_of
from kv_connector.engine.transfer_engine import TransferEngine
from kv_connector.protocol.session.fingerprint import ADVICE as _ADVICE
from kv_connector.protocol.wire.messages import Fingerprint

ADVICE = {**_ADVICE, "model": "serve the same model on the encoder engine and the prefill engine"}

# A fence takes one turn of the transfer thread. A fence that takes longer is tried again.
_FENCE_S, _RETRY_S = 0.005, 0.05


@dataclass(frozen=True)
class SessionConfig:
    name: str
    """The name of this engine in logs and at peers."""
    fingerprint: Fingerprint
    providers: tuple[str, ...] = ("host", "tcp")
    data_host: str = "127.0.0.1"
    nics: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    key: ClusterKey | None = None
    timeout: float = 10.0
    """A fetch that is not complete by then has failed, in seconds."""


def open_engine(config: SessionConfig) -> TransferEngine:
    """Opens the transfer engine. Raises TransferError."""
    domains = domains_of(config.providers, config.data_host, config.nics)
    return TransferEngine(EngineConfig(config.name, domains))


class Fences:
    """Fences of peers, repeated until they are complete. For the thread of a loop."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine
        self._pending: set[int] = set()

    def fence(self, peer: int) -> bool:
        """Ends the peer. Returns whether none of its writes can land here any more.

        False: retry() fences again.
        """
        try:
            self._engine.fence(peer, _FENCE_S)
        except TransferError as error:
            if error.code is ErrorCode.TIMEOUT:
                self._pending.add(peer)
                return False
            if error.code is not ErrorCode.UNKNOWN_PEER:
                raise
        self._pending.discard(peer)
        return True

    def retry(self) -> float | None:
        """Fences pending peers again. Returns the seconds until the next call, or None if none is pending."""
        for peer in list(self._pending):
            self.fence(peer)
        return _RETRY_S if self._pending else None

    def pending(self, peer: int) -> bool:
        return peer in self._pending
