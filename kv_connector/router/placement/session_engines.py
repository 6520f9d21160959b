"""SessionEngines: the engines of a conversation's latest turn, by the client's own name for the conversation.

A session only breaks ties between engines. Prefixes show what an engine has cached. A session also helps
where a prompt is too short for a prefix, or where a client changed what it repeats.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from kv_connector.router.engines.endpoint import Endpoint

# The client's name for a conversation: a header, then fields of OpenAI's API, from the most specific on. The
# last is a field of Anthropic's API, in which Claude Code names its session.
SESSION_HEADER = "x-session-id"
_FIELDS = ("prompt_cache_key", "user")
_USER_ID = "metadata.user_id"
# The same name with another model or another salt is another conversation: the two share no KV, and tenants
# may choose the same names.
_SCOPE = ("model", "cache_salt")

# Sessions that are remembered, the latest ones. Each takes 230 bytes, so all take 15 MB.
MOST_SESSIONS = 1 << 16


def session_of(headers: Mapping[str, str], body: Mapping[str, Any]) -> int | None:
    """Returns the key of the request's session; None if the client names none."""
    for field, name in _names(headers, body):
        if isinstance(name, str) and name:
            return hash((field, name, *(msgspec.json.encode(body.get(key)) for key in _SCOPE)))
    return None


def _names(headers: Mapping[str, str], body: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield SESSION_HEADER, headers.get(SESSION_HEADER)
    for field in _FIELDS:
        yield field, body.get(field)
    metadata = body.get("metadata")
    yield _USER_ID, metadata.get("user_id") if isinstance(metadata, dict) else None


class SessionEngines:
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
