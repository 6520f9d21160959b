"""Running: a request on its current decode engine, and the token ids of its prompt and answer."""

import enum
import re
from collections.abc import AsyncIterator

from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.pool import Lease
from kv_connector.router.placement.policy import Placement
from kv_connector.router.requests.events import END
from kv_connector.router.requests.transcript import Budget

# As vLLM writes it. In a string, for example a generated text, the quotes would be escaped.
_PROMPT_IDS = b'"prompt_token_ids":['
_IDS = b'"token_ids":['
_TEXT = b'"text":"'
_CONTENT = b'"content":"'
_GOES_ON = b'"finish_reason":null'
_QUOTE = ord('"')
_NO_DELTA = b'"delta":{}'
_LOGPROBS = b'"logprobs":{'
_ENDED = b'"finish_reason":"'
# Events without text. In a string the quotes would be escaped.
_SILENT = re.compile(rb'"choices":\[\]|"text":""|"delta":\{(?:"role":"\w+",?)?(?:"content":"")?\}')
_THINKING = re.compile(rb'"reasoning(?:_content)?":"[^"]')

# Bytes of the token ids of all requests: 22 million tokens of 6 bytes, or 1,000 requests of 22,000 tokens.
# With the router's other limits they fit into 1 GiB.
MOST_IDS = 128 << 20
# Bytes of them that prefetches leave to streams that can move: without ids, these end with their engine.
SPARE = MOST_IDS // 2


class Shown(enum.Enum):
    """Part of an answer that the client has received since an engine's server last held nothing back."""

    NOTHING = enum.auto()
    TEXT = enum.auto()
    THINKING = enum.auto()


class Running:
    """The state of a request on one decode engine.

    vLLM 0.32 reports the id of each token, whatever text it makes of the tokens, so ids are known with tools,
    formats and log probabilities as well. With a stop string, the ids end with that string. Without the
    reasoning (``include_reasoning``), vLLM reports none.

    Token ids are kept as they came, as JSON, and go to the next engine in this form. To read an event takes
    2.5 us, or 6 us if it has no text (AMD EPYC, 2026-11-29). The first event of a prompt of 32,000 tokens
    takes 0.2 ms. To make objects of it, and JSON of these objects, would take 3 ms (AMD EPYC, both cores
    busy, 2026-11-26).
    """

    def __init__(
        self,
        *,
        may_move: bool = False,
        prefetches: bool = False,
        shows_ids: bool = False,
        budget: Budget | None = None,
    ) -> None:
        """``may_move``: another engine can continue the stream, so token ids are wanted. ``prefetches``: a
        prefetch of the answer needs them. ``shows_ids``: the client wants them, too. ``budget``: bytes that
        the ids of all requests may still take."""
        self.shows_ids = shows_ids
        self._may_move = may_move
        self._prefetches = prefetches
        self._budget = budget or Budget(MOST_IDS)
        self._spare = 0 if may_move else SPARE
        self.ids = bytearray()
        """Token ids of prompt and answer, as in a JSON list."""
        self.engine: Endpoint | None = None
        """The engine that has the request; None: no engine has it yet."""
        self.lease: Lease | None = None
        """The claim on this engine."""
        self.placement: Placement | None = None
        """The placement of the latest attempt; None: there is none, or the prompt was not placed."""
        self.begin(None)

    def begin(self, engine: Endpoint | None, *, prefetches: bool = False) -> bool:
        """Notes that an engine gets the request, from the beginning. Returns whether the engine shall report
        token ids. ``prefetches``: its answer may be prefetched."""
        self.close()
        self.wants_ids = self._may_move or (prefetches and self._prefetches)
        """Whether the engine reports token ids."""
        self.engine = engine
        self.full = False
        """Whether the ids of all streams take too much memory. Those of this stream are dropped."""
        self.ended = False
        """Whether the answer's end has come."""
        self.place: tuple[int, int] | None = None
        """The latest place where the client had the text of all tokens: bytes of the ids, and tokens of the
        answer. None: no such place is known."""
        self.spoken = b""
        """The event of this place."""
        self.shown = Shown.NOTHING
        """Latest part that the client has received behind this place."""
        self.prompt = 0
        """Tokens of the prompt; 0: not reported."""
        self.said = 0
        """Tokens of the answer."""
        self.whole = False
        """Whether the last event has one token, with text and no end: the engine's server holds nothing
        back."""
        self.several = b""
        """The last event's ids, if it has several tokens, with text and no end. Half of a character may be
        held back behind the text."""
        self.cached: int | None = None
        """Tokens of the prompt that the prefill engine had in its prefix cache; None: not reported."""
        return self.wants_ids

    def close(self) -> None:
        """Drops the ids, and gives back their part of the budget."""
        self._budget.left += len(self.ids)
        self.ids = bytearray()

    async def note(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yields the engine's answer, which has token ids, as the client would see it without moves."""
        async for events in chunks:
            if said := self.read(events):
                yield said

    def read(self, events: bytes) -> bytes:
        """Records the ids of these whole events; returns the events that the client gets."""
        before = len(self.ids)
        if not self.prompt and _PROMPT_IDS in events:
            prompt, events = self._cut(events, _PROMPT_IDS)
            self.ids[:] = b",".join(prompt)
            self.prompt = _count(prompt)
            # A parser of a chat may begin within its reasoning.
            self.place = (len(self.ids), 0) if _TEXT in events else None
        last = events.rfind(END, 0, -2)
        ids = _ids_of_text(events if last < 0 else events[last:]) if self.prompt else b""
        self.whole = ids.isdigit()
        self.several = b"" if self.whole else ids
        raw = events
        answer, events = self._cut(events, _IDS)
        for some in answer:
            self.ids += b","
            self.ids += some
        self.said += 1 if self.whole and last < 0 else _count(answer)
        if self.whole:
            self.place, self.shown = (len(self.ids), self.said), Shown.NOTHING
            self.spoken = raw if last < 0 else raw[last:]
        else:
            self._look_back(raw)
        self._budget.left -= len(self.ids) - before
        self._keep_budget()
        if _NO_DELTA not in events or self.shows_ids:
            return events
        # A parser had no text for this event: it has come only for its ids.
        parts = events.split(END)
        return b"".join(event + END for event in parts if event and not _is_for_ids(event))

    def read_whole(self, body: bytes) -> bytes:
        """Records the ids of a whole answer that is no stream; returns the answer that the client gets."""
        prompt, body = self._cut(body, _PROMPT_IDS)
        answer, body = self._cut(body, _IDS)
        self.ids[:] = b",".join((*prompt, *answer))
        self.prompt, self.said = _count(prompt), _count(answer)
        self._budget.left -= len(self.ids)
        self._keep_budget()
        return body

    def _keep_budget(self) -> None:
        if self.full or self._budget.left < self._spare:
            self._drop()

    def _look_back(self, events: bytes) -> None:
        """Finds the latest place in these events where nothing was held back."""
        self.ended = self.ended or _ENDED in events
        shown, nbytes, tokens = Shown.NOTHING, 0, 0
        for event in reversed(events.split(END)[:-1]):
            if _ids_of_text(event).isdigit():
                self.place = len(self.ids) - nbytes, self.said - tokens
                self.shown, self.spoken = shown, event
                return
            if shown is Shown.NOTHING:
                shown = _shown(event)
            _, found, rest = event.partition(_IDS)
            if found and (ids := rest[: rest.find(b"]")]):
                nbytes += len(ids) + 1
                tokens += ids.count(b",") + 1
        self.shown = self.shown if shown is Shown.NOTHING else shown

    def _drop(self) -> None:
        self.close()
        self.full, self.place = True, None
        self.whole, self.several = False, b""

    def _cut(self, events: bytes, name: bytes) -> tuple[list[bytes], bytes]:
        """Returns the non-empty lists of that name, and the events as the client gets them."""
        start = events.find(name)
        if start < 0:
            return [], events
        found, pieces, end = [], [], 0
        while start >= 0:
            first = start + len(name)
            pieces.append(events[end : first - 1])
            end = events.index(b"]", first) + 1
            if ids := events[first : end - 1]:
                found.append(ids)
            pieces.append(events[first - 1 : end] if self.shows_ids else b"null")
            start = events.find(name, end)
        pieces.append(events[end:])
        return found, b"".join(pieces)


def _ids_of_text(event: bytes) -> bytes:
    """Returns the event's ids; b"" if it has no text, or is an end."""
    _, found, ids = event.partition(_IDS)
    if not found or _GOES_ON not in event:
        return b""
    text = event.partition(_TEXT)[2] or event.partition(_CONTENT)[2]
    return ids[: ids.find(b"]")] if text and text[0] != _QUOTE else b""


def _is_for_ids(event: bytes) -> bool:
    """Returns whether an engine has sent this event only for its token ids. Log probabilities go to the
    client in events without text, too."""
    return _NO_DELTA in event and _GOES_ON in event and _LOGPROBS not in event


def _shown(event: bytes) -> Shown:
    if _THINKING.search(event):
        return Shown.THINKING
    return Shown.NOTHING if _SILENT.search(event) or b'"choices"' not in event else Shown.TEXT


def _count(lists: list[bytes]) -> int:
    return sum(ids.count(b",") + 1 for ids in lists)
