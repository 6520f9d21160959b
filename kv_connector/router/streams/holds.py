"""PrefillHold: blocks that a prefill engine holds for a transfer, until a decode engine has loaded them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from kv_connector.router.engines.client import EngineClient, HttpError
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.members import Side
from kv_connector.router.engines.pool import Lease, NoEngine, Pool
from kv_connector.router.failure import Failure
from kv_connector.router.requests.completion import DISOWNED_PATH, disowned_body
from kv_connector.router.streams.calls import Call, EngineFailure

logger = logging.getLogger(__name__)


class PrefillHolds:
    """Releases what prefill engines hold for failed transfers. Used from the event loop's thread only."""

    def __init__(self, pools: Mapping[Side, Pool], client: EngineClient, patience: float) -> None:
        self._pools = pools
        self._client = client
        self._patience = patience
        self._releases: set[asyncio.Task[None]] = set()

    @property
    def releasing(self) -> int:
        """Number of transfers whose prefill engine is being notified."""
        return len(self._releases)

    def release(self, transfer_id: str, prefill: Endpoint, call: Call) -> None:
        """Starts to notify the prefill engine that no decode engine will load this transfer."""
        task = asyncio.create_task(self.release_hold(transfer_id, prefill, call))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def release_hold(self, transfer_id: str, prefill: Endpoint, call: Call) -> None:
        """Makes a decode engine notify the prefill engine. If that takes over ``patience`` seconds, the hold
        ends with its hold time."""
        try:
            async with asyncio.timeout(self._patience):
                pool = self._pools[Side.DECODE]
                chosen = pool.peer(self._pools[Side.PREFILL], prefill, pool.known(call.model))
                with pool.lease(chosen) as lease:
                    url, body = lease.endpoint.url + DISOWNED_PATH, disowned_body(transfer_id, prefill)
                    await self._client.whole("POST", url, body, lease.endpoint.headers(call.headers))
        except (*HttpError, NoEngine, Failure) as error:
            logger.info(
                "request %s: %s keeps transfer %s for its hold time: no decode engine could notify it: %s: "
                "%s",
                call.request_id,
                prefill,
                transfer_id,
                type(error).__name__,
                error,
            )

    async def close(self) -> None:
        """Waits, ``patience`` seconds at most, for the releases that have started. No request is in flight
        any more."""
        if self._releases:
            await asyncio.wait(self._releases)


@dataclass
class PrefillHold:
    """Guards a block at whose end a decode engine has answered with what the prefill engine computed.

    The prefill engine is not idle until then. Enter each object once; blocks of one transfer may overlap.

    Each attempt has its own transfer id. If the block fails, no decode engine requests this transfer again.
    Causes are that the client disconnected, that the decode engine broke off, or that it refused a body that
    the prefill engine accepted. The decode engine may never have known the request, and the prefill engine
    would keep the prompt's blocks for its hold time. So a decode engine is made to notify it. The engines
    themselves end a transfer that is in flight, and a transfer that the prefill engine alone failed.
    """

    holds: PrefillHolds
    transfer_id: str
    prefill: Lease
    call: Call
    _owing: ExitStack = field(default_factory=ExitStack, init=False)

    def __enter__(self) -> Self:
        self._owing.enter_context(self.prefill.owing())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._owing.close()
        failed_prefill = isinstance(error, EngineFailure) and [*error.blamed] == [Side.PREFILL]
        if error is not None and not failed_prefill:
            self.holds.release(self.transfer_id, self.prefill.endpoint, self.call)
