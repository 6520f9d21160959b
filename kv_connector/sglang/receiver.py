"""Receiver: one request of D, from its arrival until nothing can land in its pages."""

from __future__ import annotations

import logging
from typing import Any, NoReturn

from kv_connector.protocol.actions import Address
from kv_connector.protocol.pages.layout import GroupTarget
from kv_connector.protocol.requests import DecodeRequest
from kv_connector.sglang.internals import CommonKVReceiver, KVPoll, KVTransferError
from kv_connector.sglang.polls import Poll, receiving
from kv_connector.sglang.sender import state_rows

logger = logging.getLogger(__name__)


class Receiver(CommonKVReceiver):  # type: ignore[misc]  # SGLang is not typed for mypy
    """Called by SGLang on the scheduler's thread."""

    def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
        self._engine: Address | None = None
        self._slot: int | None = None
        """Slot of the metadata, once the request's pages are requested."""
        self._polls = 0
        """Number of polls before that."""
        self._refusal = ""
        """Why the request is refused. SGLang's table of reasons has that of the room's earlier request."""
        self.bootstrap_infos: list[dict[str, Any]] | None = None
        rooms = mgr.addr_to_rooms_tracker[bootstrap_addr]
        in_use, watched = mgr.in_use(bootstrap_room), bootstrap_room in rooms
        super().__init__(mgr, bootstrap_addr, bootstrap_room)
        self._agent = mgr.agent
        self._transfer = mgr.transfer_of(bootstrap_room)
        if in_use:
            if not watched:
                rooms.discard(bootstrap_room)
            self._owns_bootstrap_room = False  # SGLang's tables have the earlier request
            self.conclude_state = KVPoll.Failed
            self._refusal = (
                f"room {bootstrap_room} is in use: an earlier request has it, or pages of one may still "
                "arrive. Use another bootstrap_room for each request"
            )
        else:
            mgr.begins(bootstrap_room, self)

    def _setup_bootstrap_infos(self) -> None:
        """Finds P's first worker, which knows the others. Part of SGLang's init()."""
        self._engine = self.kv_mgr.engine_at(self, self.bootstrap_addr, self.prefill_dp_rank)
        if self._engine is None:
            self.bootstrap_infos = None
            self._fail(f"the bootstrap server at {self.bootstrap_addr} names no worker of the prefill engine")
            return
        # SGLang counts these entries as the workers that must release an aborted request's pages. The agent
        # answers for all of them, so there is one.
        self.bootstrap_infos = [{"rank_ip": self._engine.host, "rank_port": self._engine.port}]

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: list[Any] | None = None,
        decode_prefix_len: int | None = None,
        destination: Any = None,
        device_kv_indices: Any = None,
    ) -> None:
        """Requests the content of the request's pages, which are now allocated."""
        engine = self._engine
        if engine is None:
            self._fail(f"there is no prefill engine at {self.bootstrap_addr}")
            return
        assert aux_index is not None
        self.kv_mgr.wait_no_more(self._transfer)
        size, prefix = self.kv_mgr.kv_args.page_size, decode_prefix_len or 0
        pages = GroupTarget(prefix // size, tuple(kv_indices.tolist()))
        states = [
            state_rows(state) for state in state_indices or [None] * len(self.kv_mgr.kv_args.state_types)
        ]
        request = DecodeRequest(
            request_id=self._transfer,
            transfer_id=self._transfer,
            engine=engine,
            # SGLang names pages, not tokens.
            prompt_tokens=(pages.first + len(pages.blocks)) * size,
            first_token=prefix,
            prompt_hash=None,
            groups=(pages, GroupTarget(0, (aux_index,)), *(GroupTarget(0, rows) for rows in states)),
        )
        self._slot = aux_index
        self.kv_mgr.lands(self.bootstrap_room, self._transfer)
        self._agent.reserve(request)

    def poll(self) -> Any:
        self._hear()
        return super().poll()

    def _hear(self) -> None:
        """Copies the agent's state into the table that SGLang reads."""
        self._agent.note_step()
        if self.conclude_state is not None or self._engine is None:
            return
        if self._slot is None:
            self._queue(self._engine)
        status = receiving(self._agent.state(self._transfer), self._slot is not None)
        if status is Poll.SUCCESS and self._slot is not None:
            self.kv_mgr.rows.unpack(self._slot)
        elif status is Poll.FAILED:
            reason = self.failure() or "the transfer was cancelled"
            self.kv_mgr.record_failure(self.bootstrap_room, reason)
            self.kv_mgr.forget_engine(self.bootstrap_addr)
        self.kv_mgr.update_status(self.bootstrap_room, int(status))

    def failure(self) -> str:
        """The agent's reason for a failed transfer. Empty: the agent has none. Any thread may call it."""
        return str(self._agent.failure(self._transfer))

    def _queue(self, engine: Address) -> None:
        """SGLang polls a request once before it allocates free pages for it. A request that is polled again
        queues for pages."""
        self._polls += 1
        if self._polls == 2:
            self.kv_mgr.wait_for(self._transfer, engine)

    def _fail(self, reason: str) -> None:
        self.kv_mgr.record_failure(self.bootstrap_room, reason)
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)
        self.conclude_state = KVPoll.Failed

    def abort(self) -> None:
        """SGLang also aborts a request whose prefill server it could not reach, in 15 attempts."""
        unknown = self.conclude_state is None and self.bootstrap_infos is None
        super().abort()
        if unknown:
            self.kv_mgr.record_failure(
                self.bootstrap_room,
                f"the request ended before the bootstrap server at {self.bootstrap_addr} named its prefill "
                "engine. It was aborted, or that server does not answer",
            )

    def _send_abort_notification(self, *, force_arm: bool = False) -> None:
        """Part of SGLang's abort(), and of its handling of a failure. The pages are freed once
        Manager.is_abort_release_safe allows it."""
        if self._slot is not None:
            self.kv_mgr.keep(self.bootstrap_room)
            self._agent.cancel(self._transfer)
        else:
            self._release()

    def _clear(self) -> None:
        """Reports the end to P, whatever SGLang's queue has done with the request. Keeps nothing, except
        while pages may still land."""
        super()._clear()
        self._release()
        if self._slot is not None:
            self.kv_mgr.is_abort_release_safe(self.bootstrap_room, 1)
        self.kv_mgr.ends(self.bootstrap_room, self)

    def failure_exception(self) -> NoReturn:
        """Raises the reason of the failure, as SGLang expects."""
        if self._refusal:
            raise KVTransferError(self.bootstrap_room, self._refusal, is_from_another_rank=False)
        super().failure_exception()
        raise AssertionError("SGLang's method raises")

    def _release(self) -> None:
        """Releases a request that has requested no pages."""
        engine, self._engine = self._engine, None
        if engine is not None and self._slot is None:
            self.kv_mgr.wait_no_more(self._transfer)
            self._agent.release(self._transfer, engine)
