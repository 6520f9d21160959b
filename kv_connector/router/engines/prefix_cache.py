"""PrefixCache: which beginnings of prompts an engine has in its prefix cache, as far as a router knows."""

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Sequence

from kv_connector.router.engines.prompt import PREFIX_BYTES, PRIOR_BYTES_PER_TOKEN, Prompt, bytes_per_token

# Tokens of room, for an engine that does not report its room: that of a model of 8 billion parameters (128
# KiB a token) on a GPU of 80 GB.
_USUAL_ROOM = 400_000
# A prefix takes 125 bytes in the router's memory.
_LARGEST_ROOM = 1 << 24

# Tokens are not spread evenly over a prompt's bytes, and engines count their hits in blocks. So an engine had
# less than was believed only if it had less than half of it, and more only if it had over twice as much.
_CLEARLY = 2


class PrefixCache:
    """The prefixes that one engine has in its prefix cache.

    With a prefix the engine has the shorter prefixes too: they are never older. The engine is assumed to have
    what it was sent, and to drop what it has not used for longest, as vLLM does. Its answers correct how much
    it keeps. Part of its room is taken by what this router does not know, such as running requests and the
    prompts of other routers. An engine that keeps nothing is soon expected to keep nothing.
    """

    def __init__(self) -> None:
        self._room = _USUAL_ROOM
        # {prefix: whether an answer has confirmed that it was computed}, the least recently used first.
        self._held: OrderedDict[int, bool] = OrderedDict()
        self._taken = 0  # prefixes of its room that are taken by what this router does not know
        self._bytes_per_token = PRIOR_BYTES_PER_TOKEN

    def cached(self, prompt: Prompt) -> int:
        """Returns how many bytes of the prompt the engine need not compute."""
        return self._leading(prompt.prefixes) * PREFIX_BYTES

    def prompt_computed(self, prompt: Prompt, room: int | None = None) -> None:
        """Notes that the engine is sent the prompt, or its KV: later prompts find it there.

        ``room``: tokens that the engine can keep in all, if it reports that.
        """
        self._room = _USUAL_ROOM if room is None else min(room, _LARGEST_ROOM)
        if prompt.tokens is not None:
            self._weigh(prompt, prompt.tokens)
        self._use(prompt.prefixes, self._leading(prompt.prefixes), reported=False)

    def corrected(self, prompt: Prompt, cached: int, tokens: int) -> None:
        """Notes that the engine has computed the prompt, and had ``cached`` of its tokens before."""
        if tokens <= 0:
            return
        # A prefix that was sent and has no answer yet may be computed beside this prompt: it does not count
        # as missed.
        reported = bisect_left(prompt.prefixes, True, key=lambda prefix: not self._held.get(prefix, False))
        had = max(0, min(prompt.size * cached // tokens // PREFIX_BYTES, len(prompt.prefixes)))
        if _CLEARLY * had < reported:
            # The engine keeps less than is held here now, by the prefixes that it did not have.
            keeps = len(self._held) - (reported - had)
            self._taken = max(self._taken, self._whole_room() - keeps)
        elif had > _CLEARLY * reported:
            self._taken = max(0, self._taken - (had - reported))
        self._weigh(prompt, tokens)
        # By now the engine has all prefixes, whatever it had before.
        self._use(prompt.prefixes, reported, reported=True)

    def _leading(self, prefixes: Sequence[int]) -> int:
        """Returns how many of these prefixes the engine has."""
        return bisect_left(prefixes, True, key=lambda prefix: prefix not in self._held)

    def _use(self, prefixes: Sequence[int], before: int, *, reported: bool) -> None:
        """Makes the prefixes the most recently used, the first one last.

        ``before``: number of prefixes whose mark stays as it is.
        """
        for prefix in prefixes[before:]:
            self._held[prefix] = reported
        deque(map(self._held.move_to_end, reversed(prefixes)), maxlen=0)
        room = max(0, self._whole_room() - self._taken)
        for _ in range(len(self._held) - room):
            self._held.popitem(last=False)

    def _weigh(self, prompt: Prompt, tokens: int) -> None:
        self._bytes_per_token += (bytes_per_token(prompt, tokens) - self._bytes_per_token) / 8

    def _whole_room(self) -> int:
        """Returns the engine's whole room, in prefixes."""
        return int(self._room * self._bytes_per_token) // PREFIX_BYTES
