"""A paged KV cache: the owner of each block, the content of its cells, and the content that is awaited
there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .shape import STEP, What, Worker

# Prompt, step of its tokens, and cell. None: a place behind the prompt's end.
Content = tuple[str, int, What] | None


class Pool:
    """A block pool that hands out the block freed last, so that a late access meets a new owner."""

    def __init__(self, worker: Worker, spare: int | None = None) -> None:
        """``spare``: number of blocks that it hands out. None: all."""
        self.worker = worker
        self._free = list(range(worker.blocks - 1, 0, -1))[:spare]  # block 0 is the null block
        self.owner: dict[int, str] = {}
        # By block and cell. A cell that has landed and was counted is not awaited any more.
        self.content: dict[int, dict[int, Content]] = {}
        self.awaited: dict[int, dict[int, Content]] = {}

    def room(self) -> int:
        return len(self._free)

    def take(self, owner: str, count: int) -> list[int]:
        """Takes empty blocks."""
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self.owner[block] = owner
            self.content[block] = {}
        return blocks

    def give(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            del self.owner[block], self.content[block]
            self.awaited.pop(block, None)
        self._free.extend(blocks)

    def logical(self, layer: int, step: int) -> int:
        """Returns the logical block that holds a step of a prompt's tokens."""
        return step // len(self.worker.cells[layer])

    def cells(self, layer: int, step: int, block: int) -> Iterator[tuple[int, What]]:
        """Yields the cells of the block that this step of a prompt fills, with their place in the model."""
        steps = self.worker.cells[layer]
        for place, stride, what in steps[step % len(steps)]:
            yield place + block * stride, what

    def compute(self, layer: int, prompt: str, steps: range, table: Sequence[int]) -> None:
        for step in steps:
            block = table[self.logical(layer, step)]
            for cell, what in self.cells(layer, step, block):
                self.content[block][cell] = (prompt, step, what)

    def wait_for(self, layer: int, prompt: str, tokens: int, logical: int, block: int) -> None:
        """Expects the prompt's page of this layer in the block."""
        awaited = self.awaited.setdefault(block, {})
        each = len(self.worker.cells[layer])
        for step in range(logical * each, (logical + 1) * each):
            for cell, what in self.cells(layer, step, block):
                awaited[cell] = (prompt, step, what) if step * STEP < tokens else None

    def missing(self, layer: int, step: int, block: int) -> list[What]:
        """Returns the cells of this step of a prompt that have not arrived."""
        awaited = self.awaited[block]
        return [what for cell, what in self.cells(layer, step, block) if cell in awaited]
