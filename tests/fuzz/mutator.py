"""Inputs for decoders: valid ones, cut up and put together wrongly. The same seed gives the same inputs."""

from __future__ import annotations

import random
from collections.abc import Sequence

# Typical wrong values of lengths, counts and tags.
_SPECIAL = (0x00, 0x01, 0x7F, 0x80, 0xFE, 0xFF, 0xC0, 0xC1, 0xC6, 0xDB, 0xDD, 0xDF)
# Longer inputs find nothing new in a decoder and take longer.
_LONGEST = 1 << 16


class Mutator:
    """An endless supply of inputs that are nearly those of the corpus."""

    def __init__(self, seed: str, corpus: Sequence[bytes]) -> None:
        self._random = random.Random(seed)
        self._corpus = list(corpus)

    def next(self) -> bytes:
        pick = self._random
        if pick.random() < 0.02:
            return pick.randbytes(pick.randrange(200))
        data = bytearray(pick.choice(self._corpus))
        for _ in range(pick.choice((1, 1, 1, 2, 3, 8))):
            self._mutate(data)
        return bytes(data[:_LONGEST])

    def _mutate(self, data: bytearray) -> None:
        pick = self._random
        at = pick.randrange(len(data)) if data else 0
        match pick.randrange(7):
            case 0 if data:
                data[at] ^= 1 << pick.randrange(8)
            case 1 if data:
                data[at] = pick.choice(_SPECIAL)
            case 2:
                del data[at:]
            case 3:
                data[at:at] = pick.randbytes(pick.randrange(1, 9))
            case 4:
                del data[at : at + pick.randrange(1, 9)]
            case 5:
                other = pick.choice(self._corpus)
                data[at:] = other[pick.randrange(len(other) + 1) :]
            case 6:
                data[at:at] = data[at : at + pick.randrange(1, 65)] * pick.randrange(1, 4)
