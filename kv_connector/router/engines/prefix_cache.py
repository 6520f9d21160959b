"""PrefixCache: which beginnings of prompts an engine has in its prefix cache, as a router knows it."""

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Sequence

from kv_connector.router.engines.prompt import PREFIX_BYTES, PRIOR_BYTES_PER_TOKEN, Prompt, bytes_per_token

# Of an engine that does not say what it has room for: what a model of 8 billion parameters (128 KiB a token)
# has on a GPU of 80 GB.
_USUAL_ROOM = 400_000
# A prefix takes 125 bytes here.
_LARGEST_ROOM = 1 << 24

# Tokens are not spread evenly over a prompt's bytes, and engines count their hits in blocks: one had less
# than was believed where it had not half of it, and more where it had over twice as much.
_CLEARLY = 2


class PrefixCache:
    """An engine's. With a prefix it has those before it, too: they are never the older ones.

    The engine is taken to have what it was sent, and to drop what it has not used for longest, as vLLM does.
    Its answers correct how much it keeps: part of its room is taken by what is not known here, such as
    running requests and the prompts of other routers. What keeps nothing is soon expected to keep nothing.
    """

    def __init__(self) -> None:
        self._room = _USUAL_ROOM
        # Whether an answer has told that the prefix was computed; the least recently used first.
        self._held: OrderedDict[int, bool] = OrderedDict()
        self._taken = 0  # of the room, by what is not known here; in prefixes
        self._bytes_per_token = PRIOR_BYTES_PER_TOKEN

    def cached(self, prompt: Prompt) -> int:
        """How many bytes of the prompt the engine need not compute."""
        return self._leading(prompt.prefixes) * PREFIX_BYTES

    def prompt_computed(self, prompt: Prompt, room: int | None = None) -> None:
        """The engine is sent the prompt, or its KV: who comes behind finds it. ``room``: tokens that it can
        keep in all, where it says so."""
        self._room = _USUAL_ROOM if room is None else min(room, _LARGEST_ROOM)
        if prompt.tokens is not None:
            self._weigh(prompt, prompt.tokens)
        self._use(prompt.prefixes, self._leading(prompt.prefixes), reported=False)

    def corrected(self, prompt: Prompt, cached: int, tokens: int) -> None:
        """The engine has computed the prompt that it was sent, and had so many of its tokens before that."""
        if tokens <= 0:
            return
        # What was sent before and has no answer yet may be computed beside this one: it was not missed.
        reported = bisect_left(prompt.prefixes, True, key=lambda prefix: not self._held.get(prefix, False))
        had = max(0, min(prompt.size * cached // tokens // PREFIX_BYTES, len(prompt.prefixes)))
        if _CLEARLY * had < reported:
            # It keeps less than is held here now, by what it did not have.
            keeps = len(self._held) - (reported - had)
            self._taken = max(self._taken, self._whole_room() - keeps)
        elif had > _CLEARLY * reported:
            self._taken = max(0, self._taken - (had - reported))
        self._weigh(prompt, tokens)
        # By now it has all of it, whatever it had before.
        self._use(prompt.prefixes, reported, reported=True)

    def _leading(self, prefixes: Sequence[int]) -> int:
        """How many of them it has."""
        return bisect_left(prefixes, True, key=lambda prefix: prefix not in self._held)

    def _use(self, prefixes: Sequence[int], before: int, *, reported: bool) -> None:
        """Makes them the youngest, the first of them last. ``before``: so many are as they are to be."""
        for prefix in prefixes[before:]:
            self._held[prefix] = reported
        deque(map(self._held.move_to_end, reversed(prefixes)), maxlen=0)
        room = max(0, self._whole_room() - self._taken)
        for _ in range(len(self._held) - room):
            self._held.popitem(last=False)

    def _weigh(self, prompt: Prompt, tokens: int) -> None:
        self._bytes_per_token += (bytes_per_token(prompt, tokens) - self._bytes_per_token) / 8

    def _whole_room(self) -> int:
        """In prefixes."""
        return int(self._room * self._bytes_per_token) // PREFIX_BYTES
