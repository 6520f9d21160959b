"""A paged KV cache: who owns each block, what each page holds, and what is awaited in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kv_connector.protocol.geometry import Place, opaque_page
from kv_connector.protocol.layout import GroupLayout, KvLayout, LayerLayout

# Small on purpose: a block that comes back is soon somebody else's.
BLOCKS = 160
TOKENS = 16  # a block
PAGE = 64
LAYER_BYTES = BLOCKS * PAGE
# Two KV groups whose layers take turns, as in a model with sliding windows, and a row for each request, which
# is there once the whole prompt is computed.
GROUP_OF_LAYER = (0, 1, 0, 2)
LAYERS = len(GROUP_OF_LAYER)
LAYERS_OF_GROUP = ((0, 2), (1,), (3,))
ROWS = 2  # the group
LAYOUT = KvLayout(
    (
        GroupLayout(BLOCKS, TOKENS, "full"),
        GroupLayout(BLOCKS, TOKENS, "sliding_window"),
        GroupLayout(BLOCKS, 0, "state"),
    ),
    tuple(
        LayerLayout(f"layer{k}", group, "", opaque_page(Place(0, k * LAYER_BYTES, PAGE), PAGE))
        for k, group in enumerate(GROUP_OF_LAYER)
    ),
)
# The layers of prefill engines whose model runs in stages.
STAGES = ((0, 1), (2, 3))


def layout_of(layers: Sequence[int]) -> KvLayout:
    """Of an engine that has these layers only."""
    return KvLayout(LAYOUT.groups, tuple(LAYOUT.layers[layer] for layer in layers))


Content = tuple[str, int, int]  # prompt, logical block, layer
Page = tuple[int, int]  # layer, block


class Pool:
    """The block that was freed last is taken first: who comes late meets a new owner."""

    def __init__(self) -> None:
        self._free = list(range(BLOCKS - 1, 0, -1))  # block 0 is the null block
        self.owner: dict[int, str] = {}
        self.content: dict[Page, Content] = {}
        self.awaited: dict[Page, Content] = {}

    def room(self) -> int:
        return len(self._free)

    def take(self, owner: str, count: int) -> list[int]:
        """Blocks with nothing in them."""
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self.owner[block] = owner
            for layer in range(LAYERS):
                self.content.pop((layer, block), None)
        return blocks

    def give(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            del self.owner[block]
            for layer in range(LAYERS):
                self.awaited.pop((layer, block), None)
        self._free.extend(blocks)

    def wait_for(self, pages: Iterable[tuple[Page, Content]]) -> None:
        self.awaited.update(pages)
