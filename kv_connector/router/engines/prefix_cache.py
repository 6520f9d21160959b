"""PrefixCache: which beginnings of prompts an engine has in its prefix cache, as far as a router knows."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from kv_connector.router.bodies.prompt import PRIOR_BYTES_PER_TOKEN, Prompt, bytes_per_token

# Tokens of room, for an engine that does not report its room: that of a model of 8 billion parameters (128
# KiB a token) on a GPU of 80 GB.
_USUAL_ROOM = 400_000
_LARGEST_ROOM = 1 << 24

# Prefixes of all engines together. Each takes 190 bytes of the router's memory (integration/benchmarks/
# router_decision.py, 64 engines, 2026-11-29), so the index takes 100 MB at most. 64 engines of _USUAL_ROOM
# have 100,000 at 1 KiB each, and 400,000 if clients send token ids, whose prefixes end every 256 bytes. A
# pinned prefix takes 56 bytes more, for its tuple.
MOST_PREFIXES = 1 << 19

# Tokens are not spread evenly over a prompt's bytes, and engines count their hits in blocks. So an engine had
# less than was believed only if it had less than half of it, and more only if it had over twice as much.
_CLEARLY = 2
# A hit ends with a block of the engine, so a loss of less than a block is none. A block of so many tokens is
# the largest that is usual.
_BLOCK_TOKENS = 256


class PrefixIndex:
    """The prefix caches of all engines: for each prefix, the engines that have it.

    Each engine has a bit of the masks. Used from the event loop's thread only.
    """

    def __init__(self, most: int = MOST_PREFIXES) -> None:
        """``most``: number of prefixes of all engines together, above which the largest cache shrinks."""
        self._most = most
        self._holders: dict[int, int] = {}  # {prefix: mask of the engines that have it}
        self._caches: dict[int, PrefixCache] = {}  # by bit
        self._entries = 0

    def __len__(self) -> int:
        """Returns the number of prefixes of all engines together."""
        return self._entries

    def add(self, cache: PrefixCache) -> None:
        """Adds an engine's cache. A second call for the same cache does nothing."""
        if cache.index is self:
            return
        bit = next(1 << number for number in range(len(self._caches) + 1) if 1 << number not in self._caches)
        self._caches[bit] = cache
        cache.join(self, bit)

    def remove(self, cache: PrefixCache) -> None:
        """Removes an engine's cache. A second call does nothing."""
        if cache.index is self:
            bit = cache.bit
            cache.clear()  # hits that are never reported keep the lease of an engine that has left
            cache.leave()
            del self._caches[bit]

    def matches(self, prompt: Prompt) -> list[tuple[int, int]]:
        """Returns [(mask of engines, bytes of the prompt that each of them has)], the most bytes first.

        An engine may be in several masks, of which the first counts. An engine in no mask has nothing.
        """
        prefixes, holders = prompt.prefixes, self._holders
        found: list[tuple[int, int]] = []
        low = 0
        # An engine with a prefix has the shorter ones: masks only shrink along the prompt.
        while low < len(prefixes) and (mask := holders.get(prefixes[low], 0)):
            end = bisect_left(prefixes, True, low, key=lambda prefix: holders.get(prefix, 0) != mask)
            found.append((mask, prompt.bytes_of(end)))
            low = end
        found.reverse()
        return found

    def took(self, bit: int, prefixes: Collection[int]) -> None:
        """Notes prefixes that a cache has taken."""
        holders = self._holders
        for prefix in prefixes:
            holders[prefix] = holders.get(prefix, 0) | bit
        self._entries += len(prefixes)

    def dropped(self, bit: int, prefixes: Collection[int]) -> None:
        """Notes prefixes that a cache has dropped."""
        holders = self._holders
        for prefix in prefixes:
            if mask := holders[prefix] & ~bit:
                holders[prefix] = mask
            else:
                del holders[prefix]
        self._entries -= len(prefixes)

    def make_room(self, cache: PrefixCache, new: list[int], nbytes: int) -> None:
        """Drops prefixes while there are too many, after a cache has taken ``new`` ones of so many bytes.

        The largest caches lose their oldest prefixes, and never more bytes than the new prefixes have. If
        that is not enough, the longest new ones go: an engine's own cache drops no more for them either. A
        cache with at most its part of the prefixes, as many as each of all caches may have, loses nothing.
        Pinned prefixes are not dropped.
        """
        part = self._most // len(self._caches)
        while (over := self._entries - self._most) > 0:
            spare = [one for one in self._caches.values() if len(one) > part and one.can_drop]
            if new and (nbytes <= 0 or not spare):
                cache.drop(new[-over:])
                del new[-over:]
            elif spare:
                largest = max(spare, key=len)
                nbytes -= largest.drop_oldest(min(over, len(largest) - part), max(nbytes, 1))
            else:
                break


@dataclass
class Pin:
    """A request's use of the blocks of its prompt, at one engine."""

    prefixes: Sequence[int]
    count: int = 0
    """Number of the first prefixes that are pinned."""
    clears: int = 0
    """Number of times that the cache had been cleared when they were pinned."""


class PrefixCache:
    """The prefixes that one engine has in its prefix cache.

    With a prefix the engine has the shorter prefixes too: they are never older. The engine is assumed to have
    what it has computed or received, and to drop what it has not used for longest, as vLLM does. It drops no
    prefix of a running request, whose blocks are in use: such prefixes are pinned. Its answers
    correct how much it keeps. Part of its room is taken by what this router does not know, such as running
    requests and the prompts of other routers. An engine that keeps nothing is soon expected to keep nothing.
    """

    def __init__(self, moved: Callable[[], None] = lambda: None) -> None:
        """``moved``: called when the engine gets another bit."""
        self._moved = moved
        self.index: PrefixIndex | None = None
        self.bit = 0
        """The engine's bit in the masks of the index."""
        self._room = _USUAL_ROOM
        self._loading = 0  # tokens of its room that prompts and answers take which it is about to have
        # {prefix: its bytes behind the prefix before}, the least recently used first. Without pinned ones. To
        # the last prefix of a prompt belong the bytes behind it, too.
        self._held: OrderedDict[int, int] = OrderedDict()
        self._pinned: dict[int, tuple[int, int]] = {}  # {prefix: its bytes, and the requests that pin it}
        self._clears = 0  # a pin ends with the cache's contents
        self._bytes = 0  # of all prefixes, pinned ones included
        self._taken = 0  # bytes of its room that are taken by what this router does not know
        self._bytes_per_token = PRIOR_BYTES_PER_TOKEN

    def __len__(self) -> int:
        return len(self._held) + len(self._pinned)

    def __contains__(self, prefix: int) -> bool:
        return prefix in self._held or prefix in self._pinned

    @property
    def can_drop(self) -> bool:
        """Whether it has a prefix that is not pinned."""
        return bool(self._held)

    def join(self, index: PrefixIndex, bit: int) -> None:
        """Makes the index reflect this cache. For PrefixIndex.add()."""
        self.index, self.bit = index, bit
        index.took(bit, [*self._held, *self._pinned])
        self._moved()

    def leave(self) -> None:
        """Takes this cache out of its index. For PrefixIndex.remove()."""
        if self.index is not None:
            self.index.dropped(self.bit, [*self._held, *self._pinned])
        self.index, self.bit = None, 0
        self._moved()

    def clear(self) -> None:
        """Forgets all prefixes: the engine has dropped them."""
        if self.index is not None:
            self.index.dropped(self.bit, [*self._held, *self._pinned])
        self._held.clear()
        self._pinned.clear()
        self._clears += 1
        self._bytes = 0

    def cached(self, prompt: Prompt) -> int:
        """Returns how many bytes of the prompt the engine need not compute."""
        return prompt.bytes_of(self._leading(prompt.prefixes))

    def prompt_computed(self, prompt: Prompt, room: int | None = None, tokens: int = 0) -> None:
        """Notes that the engine has computed the prompt, or has received its KV: later prompts find it there.

        ``room``: tokens that the engine can keep in all, if it reports that. ``tokens``: forecast of the
        prompt's tokens, from an engine whose answers do not correct it; 0: no forecast.
        """
        self._room = _USUAL_ROOM if room is None else min(room, _LARGEST_ROOM)
        known = tokens if prompt.tokens is None else prompt.tokens
        if known and prompt.measurable:
            self._weigh(prompt, known)
        self._use(prompt)

    def corrected(self, prompt: Prompt, cached: int, tokens: int, expected: int) -> None:
        """Notes that the engine had ``cached`` of the prompt's tokens when it computed the prompt.

        ``expected``: cached() when the prompt was sent. The engine has the whole prompt by now, which
        prompt_computed() notes.
        """
        if tokens <= 0:
            return
        # A prefix that came or went since then does not count as missed.
        believed = min(self.cached(prompt), expected)
        had = prompt.bytes_with(cached, tokens)
        block = _BLOCK_TOKENS * bytes_per_token(prompt, tokens)
        if _CLEARLY * had < believed and believed - had >= block:
            # The engine keeps less than is held here now, by the bytes that it did not have.
            self._taken = max(self._taken, self._room_left() - (self._bytes - (believed - had)))
        elif had > _CLEARLY * believed:
            self._taken = max(0, self._taken - (had - believed))
        self._weigh(prompt, tokens)

    def drop_oldest(self, count: int, nbytes: int) -> int:
        """Forgets the least recently used prefixes that are not pinned, and returns the bytes that they had.

        Forgets at most so many, and no more once they had ``nbytes``.
        """
        before = self._bytes
        gone: list[int] = []
        while self._held and len(gone) < count and before - self._bytes < nbytes:
            prefix, size = self._held.popitem(last=False)
            self._bytes -= size
            gone.append(prefix)
        if self.index is not None:
            self.index.dropped(self.bit, gone)
        return before - self._bytes

    def drop(self, prefixes: Iterable[int]) -> None:
        """Forgets these prefixes, as far as they are held and not pinned."""
        gone = [prefix for prefix in prefixes if prefix in self._held]
        self._bytes -= sum(map(self._held.pop, gone))
        if self.index is not None:
            self.index.dropped(self.bit, gone)

    def _leading(self, prefixes: Sequence[int]) -> int:
        """Returns how many of these prefixes the engine has."""
        return bisect_left(prefixes, True, key=lambda prefix: prefix not in self)

    def _use(self, prompt: Prompt) -> None:
        """Makes the prefixes the most recently used, the first one last."""
        prefixes, held = prompt.prefixes, self._held
        before = self._leading(prefixes)
        new: list[int] = []
        size, last = self._bytes, prompt.bytes_of(before)
        for number, prefix in enumerate(prefixes[before:], before + 1):
            end = prompt.bytes_of(number)
            if prefix not in self:  # a hidden prefix may be held behind another one
                held[prefix] = end - last
                self._bytes += end - last
                new.append(prefix)
            last = end
        if new and before:
            # The rest behind it was that of a shorter prompt, and is a part of the next prefix now.
            self._resize(prefixes[before - 1], prompt.bytes_of(before) - prompt.bytes_of(before - 1))
        if prefixes:
            self._resize(prefixes[-1], prompt.size - prompt.bytes_of(len(prefixes) - 1))
        taken = self._bytes - size
        if new and self.index is not None:
            self.index.took(self.bit, new)
        deque(map(held.move_to_end, filter(held.__contains__, reversed(prefixes))), maxlen=0)
        self._shrink()
        if self.index is not None:
            self.index.make_room(self, new, taken)

    def _resize(self, prefix: int, size: int) -> None:
        if prefix in self._held:
            before, self._held[prefix] = self._held[prefix], size
        else:
            before, pins = self._pinned[prefix]
            self._pinned[prefix] = size, pins
        self._bytes += size - before

    def pin(self, pin: Pin) -> None:
        """Notes that a request uses the blocks of what is held of its prompt.

        A further call notes that more of the prompt is held by then.
        """
        if pin.clears != self._clears:
            pin.count, pin.clears = 0, self._clears
        leading = self._leading(pin.prefixes)
        for prefix in pin.prefixes[pin.count : leading]:
            size, pins = self._pinned.get(prefix) or (self._held.pop(prefix), 0)
            self._pinned[prefix] = size, pins + 1
        pin.count = max(pin.count, leading)

    def unpin(self, pin: Pin) -> None:
        """Notes that the request has ended. Its prefixes are the most recently used then."""
        if pin.clears != self._clears:
            return
        for prefix in reversed(pin.prefixes[: pin.count]):  # the first one last, as in _use()
            size, pins = self._pinned.pop(prefix)
            if pins > 1:
                self._pinned[prefix] = size, pins - 1
            else:
                self._held[prefix] = size
        pin.count = 0
        self._shrink()

    def load(self, tokens: int) -> None:
        """Notes that the engine takes blocks for so many tokens, which it is about to receive, compute or
        generate. Negative: it has them, or they do not come."""
        self._loading += tokens
        if tokens > 0:
            self._shrink()

    def _shrink(self) -> None:
        """Drops what the engine has no room for."""
        room = self._room_left() - self._taken
        self.drop_oldest(len(self._held), self._bytes - max(0, room))

    def _weigh(self, prompt: Prompt, tokens: int) -> None:
        self._bytes_per_token += (bytes_per_token(prompt, tokens) - self._bytes_per_token) / 8

    def _room_left(self) -> int:
        """Returns the engine's room without what it is about to receive, in bytes of prompts."""
        return int((self._room - self._loading) * self._bytes_per_token)
