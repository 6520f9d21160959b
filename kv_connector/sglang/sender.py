"""Sender: one request of P, from its arrival until nothing reads its pages."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

from kv_connector.protocol.actions import State
from kv_connector.protocol.requests import ComputedPages, GroupPages, PrefillRequest
from kv_connector.sglang.internals import CommonKVSender, KVPoll
from kv_connector.sglang.polls import Poll, sending

logger = logging.getLogger(__name__)


class Sender(CommonKVSender):  # type: ignore[misc]  # SGLang is not typed for mypy
    """Called by SGLang on the scheduler's thread."""

    def __init__(
        self,
        mgr: Any,
        bootstrap_addr: str,
        bootstrap_room: int,
        req_has_disagg_prefill_dp_rank: bool = False,
    ) -> None:
        self._agent = mgr.agent
        self._transfer = mgr.transfer_of(bootstrap_room)
        self._first_page = 0
        self._complete = False
        """Whether all pages were handed over."""
        self._over = False
        """Whether the agent knows that the request is over, and keeps nothing for it."""
        self._early: threading.Thread | None = None
        self._early_send_wait_event: Any = None  # set by SGLang's scheduler before an early send()
        super().__init__(mgr, bootstrap_addr, bootstrap_room, req_has_disagg_prefill_dp_rank)
        # SGLang names pages, not tokens. The room alone identifies the prompt.
        self._number = mgr.expect(PrefillRequest(self._transfer, self._transfer, None, None))

    def pop_decode_prefix_len(self) -> int:
        """Number of tokens that D has. Known once the request is bootstrapped."""
        tokens: int = self._agent.first_token(self._transfer)
        self._first_page = tokens // self.kv_mgr.kv_args.page_size
        return tokens

    def send(
        self,
        kv_indices: Any,
        state_indices: list[Any] | None = None,
        num_kv_tokens: int | None = None,
        indices_event: Any = None,
    ) -> None:
        """These pages are computed, or will be when SGLang's event has occurred. With the last pages the
        metadata slot is filled and the states are named."""
        if self.conclude_state in (KVPoll.Success, KVPoll.Failed):
            return
        kv_indices, places, last, skip = self._prepare_send_indices(kv_indices, state_indices)
        if skip:
            return
        if last:  # pages that have arrived by now were sent during the prefill
            self._agent.note_prefill_end((self._transfer,))
        pages = ComputedPages(
            self._transfer, None, self._groups(kv_indices, places.start, last, state_indices)
        )
        event, self._early_send_wait_event = self._early_send_wait_event, None
        if event is not None:
            self._send_after(event, pages)
        else:
            self._agent.pages_computed(pages)
        self._record_transfer_indices(kv_indices, state_indices)
        if last:
            if self._early is not None:  # its event occurred before this step's result
                self._early.join()
            self._complete = True
            self._agent.request_finished(self._transfer, True)

    def _groups(
        self, kv_indices: Any, first: int, last: bool, states: Sequence[Any] | None
    ) -> tuple[GroupPages, ...]:
        pages = GroupPages(self._first_page + first, tuple(kv_indices.tolist()))
        kinds = len(self.kv_mgr.kv_args.state_types)
        if not last:
            return pages, *(GroupPages(0, ()) for _ in range(1 + kinds))
        self.kv_mgr.rows.pack(self.aux_index)
        rows = [state_rows(state) for state in states or [None] * kinds]
        return pages, GroupPages(0, (self.aux_index,)), *(GroupPages(0, state) for state in rows)

    def _send_after(self, event: Any, pages: ComputedPages) -> None:
        """Hands over the prompt's cached pages, which a GPU may still be computing in the step before this
        one."""

        def wait() -> None:
            event.synchronize()
            self._agent.pages_computed(pages)

        self._early = threading.Thread(target=wait, name=f"kv-early-{self._transfer}", daemon=True)
        self._early.start()

    def poll(self) -> Any:
        self._hear()
        return super().poll()

    def poll_pp_consensus(self) -> Any:
        self._hear()
        return super().poll_pp_consensus()

    def _hear(self) -> None:
        """Copies the agent's state into the table that SGLang reads, and that its other stages receive."""
        if self.conclude_state is not None or self._over:
            return
        if self.bootstrap_room not in self.kv_mgr.request_status:
            return  # SGLang has cleared the room and takes it as failed. An update would open it again.
        self.kv_mgr.catch_up(self._number)
        status = sending(self._agent.state(self._transfer), self._complete)
        if status is Poll.FAILED:
            reason = self._agent.failure(self._transfer) or "the transfer was cancelled"
            self.kv_mgr.record_failure(self.bootstrap_room, reason)
        self.kv_mgr.update_status(self.bootstrap_room, int(status))

    def abort(self) -> None:
        """BLOCKS until nothing reads the request's pages."""
        super().abort()
        self._end("the prefill engine aborted the request", aborted=True)

    def clear(self) -> None:
        """BLOCKS as abort() does, if the transfer has not ended."""
        super().clear()
        self._end("the prefill engine gave the request up")

    def _end(self, reason: str, *, aborted: bool = False) -> None:
        if self._over:
            return
        self._over = True
        state = self._agent.state(self._transfer)
        if state is not State.DONE:
            self._agent.request_finished(self._transfer, False, reason, aborted=aborted)
            if state is not State.FAILED:
                self._agent.preempt((self._transfer,))  # SGLang reuses the pages at once
        self._agent.forget(self._transfer)


def state_rows(indices: Any) -> tuple[int, ...]:
    """A state's rows in SGLang's forms: an array, a list of arrays, or None."""
    if indices is None:
        return ()
    found: list[int] = []
    for index in indices.tolist() if hasattr(indices, "tolist") else indices:
        if hasattr(index, "tolist"):
            row = index.tolist()
            found += row if isinstance(row, list) else [row]
        else:
            found.append(int(index))
    return tuple(found)
