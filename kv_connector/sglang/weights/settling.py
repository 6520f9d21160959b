"""Settling: pauses the scheduler of a prefill or decode server for new weights, without loss of requests.

SGLang's own pause takes effect at once. A paused scheduler does not move its transfers on, so the cache would
stay in use. Settling delays the pause until no page is between the two servers:

- A decode server begins no more transfers, and those that it has begun end. SGLang retracts the requests that
  decode. After the pause the prefill server computes them again. Requests that it could not compute again
  end before the pause.
- A prefill server computes and sends all prompts for which a decode server has pages.

Requests that have no pages yet may wait for a long time. They stay in their queue, which SGLang does not see
during the pause. Otherwise it would not empty its cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Settling:
    """Belongs to one scheduler, on whose thread SGLang calls it. All ranks decide alike, in the same turn."""

    def __init__(self, scheduler: Any, *, recomputes: bool) -> None:
        """``recomputes``: a prefill server computes requests again that are retracted here."""
        self._scheduler, self._recomputes = scheduler, recomputes
        self._pause: Callable[[], None] | None = None
        """SGLang's pause, while it is delayed."""
        self._hides = False
        """Whether SGLang does not see requests without pages."""
        self._hidden: list[Any] = []

    def pause(self, pause: Callable[[], None]) -> None:
        """Calls ``pause`` in the turn in which the server is settled."""
        if self._scheduler._engine_paused:
            pause()
            return
        self._pause, self._hides = pause, self._decodes

    def turn(self) -> None:
        """SGLang has received the requests of a turn, and computes nothing at the moment."""
        if self._hides:
            self._hide()
        if self._pause is not None and self._settled():
            pause, self._pause = self._pause, None
            self._hides = True
            self._hide()
            pause()

    def resume(self) -> None:
        """SGLang is about to resume, or to end a pause that is still delayed."""
        self._pause, self._hides = None, False
        self._show()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """SGLang sees all requests in the block, such as those that it aborts."""
        self._show()
        try:
            yield
        finally:
            if self._hides:
                self._hide()

    @property
    def _decodes(self) -> bool:
        return self._scheduler.disagg_decode_prealloc_queue is not None

    @property
    def _queue(self) -> Any:
        decode, prefill = (
            self._scheduler.disagg_decode_prealloc_queue,
            self._scheduler.disagg_prefill_bootstrap_queue,
        )
        return prefill if decode is None else decode

    def _settled(self) -> bool:
        scheduler = self._scheduler
        if self._decodes:
            transfers = scheduler.disagg_decode_transfer_queue
            return not (
                transfers.queue
                or transfers.has_pending_deferred_releases()
                or self._queue.retracted_queue
                or scheduler.grammar_manager.grammar_queue
                or any(map(self._must_end, [*scheduler.running_batch.reqs, *scheduler.waiting_queue]))
            )
        if any(request.kv.holds_kv for request in self._queue.queue):
            return False
        self._hide()
        try:
            return bool(scheduler.is_fully_idle())
        finally:
            self._show()

    def _must_end(self, request: Any) -> bool:
        """Whether a request that decodes could not be computed again, because SGLang sends its tokens alone,
        or should not: it is aborted, which takes effect in its next step."""
        tokens_alone = request.multimodal_inputs is None and request.input_embeds is None
        return request.to_finish is not None or not (self._recomputes and tokens_alone)

    def _hide(self) -> None:
        self._hidden += self._queue.queue
        self._queue.queue = []

    def _show(self) -> None:
        self._queue.queue = [*self._hidden, *self._queue.queue]
        self._hidden = []
