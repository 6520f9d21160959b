"""Sessions: the engines that had a conversation's latest turn, by the client's own name for the conversation.

A session only breaks ties between engines. Prefixes show what an engine has cached. A session also helps
where a prompt is too short for a prefix, or where a client changed what it repeats.
"""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from kv_connector.router.engines.endpoint import Endpoint

# The client's name for a conversation: a header, then fields of OpenAI's API, from the most specific on.
SESSION_HEADER = "x-session-id"
_FIELDS = ("prompt_cache_key", "user")

# Sessions that are remembered, the latest ones. Each takes 230 bytes, so all take 15 MB.
MOST_SESSIONS = 1 << 16


def session_of(headers: Mapping[str, str], body: Mapping[str, Any]) -> int | None:
    """Returns the key of the request's session; None if the client names none."""
    if name := headers.get(SESSION_HEADER):
        return hash((SESSION_HEADER, name))
    for field in _FIELDS:
        if isinstance(name := body.get(field), str) and name:
            return hash((field, name))
    return None


class Sessions:
    """The latest engines of each session. Used from the event loop's thread only."""

    def __init__(self, most: int = MOST_SESSIONS) -> None:
        self._most = most
        self._engines: OrderedDict[int, tuple[Endpoint | None, Endpoint]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._engines)

    def engines(self, session: int | None) -> tuple[Endpoint | None, Endpoint | None]:
        """Returns the prefill and the decode engine of the session's latest request; None if not known."""
        return (None, None) if session is None else self._engines.get(session, (None, None))

    def placed(self, session: int | None, prefill: Endpoint | None, decode: Endpoint) -> None:
        """Notes the engines of the session's latest request. ``prefill``: None leaves the engine before."""
        if session is None:
            return
        before, _ = self._engines.pop(session, (None, None))
        self._engines[session] = prefill or before, decode
        if len(self._engines) > self._most:
            self._engines.popitem(last=False)
