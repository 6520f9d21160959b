"""Request: a client's request in flight, on whichever decode engine it is."""

from __future__ import annotations

from dataclasses import replace

from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.placement.session_engines import session_of
from kv_connector.router.requests.completion import Completion
from kv_connector.router.requests.continuation import CHAT, has_ids, stay_reason
from kv_connector.router.requests.transcript import Budget
from kv_connector.router.streams.calls import Call
from kv_connector.router.streams.running import Running


class Request:
    """A client's request in flight."""

    def __init__(self, completion: Completion, call: Call, ids: Budget, *, prefetches: bool = False) -> None:
        """``ids``: bytes that the token ids of all requests may still take. ``prefetches``: the router
        prefetches answers of conversations, for which it needs their ids."""
        self.completion = completion
        self._ids = ids
        self._stays = stay_reason(call.path, completion)
        self._prefetches = prefetches and may_go_on(call, completion) and has_ids(call.path, completion)
        self._looked_at = False  # whether the prompt has been looked at
        self.running = self.new_running()
        self.call = replace(call, running=self.running)
        self.failed = 0
        """Number of failed moves from its current engine."""
        self.to: Endpoint | None = None
        """Target that balancing has chosen for it."""
        self.moving = False
        self.resumed = 0
        """How often it has continued after the failure of its decode engine."""
        self.resumed_at = 0
        """Tokens of the answer when it continued last."""

    def new_running(self) -> Running:
        shows_ids = self.completion.body.get("return_token_ids") is True
        return Running(
            may_move=self.may_move, prefetches=self._prefetches, shows_ids=shows_ids, budget=self._ids
        )

    @property
    def may_move(self) -> bool:
        """Whether another engine can continue it, as far as that is known without a look at its prompt."""
        return self._stays is None

    @property
    def stays(self) -> str | None:
        """Reason why it must end on the engine where it began; None: another engine can continue it."""
        if self._stays is None and not self._looked_at:
            self._looked_at = True
            self._stays = None if self.completion.only_text() else "more_than_text"
        return self._stays

    def goes_on(self, running: Running) -> None:
        """Notes that another decode engine has the request."""
        self.running.close()
        self.running, self.failed, self.to = running, 0, None


def may_go_on(call: Call, completion: Completion) -> bool:
    """Returns whether the request may be a turn of a conversation."""
    return call.path == CHAT or session_of(call.headers, completion.body) is not None
