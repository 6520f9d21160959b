"""A paged KV cache: who owns each block, what each of its cells holds, and what is awaited there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .shape import STEP, What, Worker

# Of a prompt: a step of its tokens. None: there are none, it is behind the prompt's end.
Content = tuple[str, int, What] | None


class Pool:
    """The block that was freed last is taken first: who comes late meets a new owner."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._free = list(range(worker.blocks - 1, 0, -1))  # block 0 is the null block
        self.owner: dict[int, str] = {}
        # By block and cell. What has landed and was counted is not awaited any more.
        self.content: dict[int, dict[int, Content]] = {}
        self.awaited: dict[int, dict[int, Content]] = {}

    def room(self) -> int:
        return len(self._free)

    def take(self, owner: str, count: int) -> list[int]:
        """Blocks with nothing in them."""
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
        """The logical block that a step of a prompt's tokens lies in."""
        return step // len(self.worker.cells[layer])

    def cells(self, layer: int, step: int, block: int) -> Iterator[tuple[int, What]]:
        """What that step of a prompt fills of the block that it lies in."""
        steps = self.worker.cells[layer]
        for place, stride, what in steps[step % len(steps)]:
            yield place + block * stride, what

    def compute(self, layer: int, prompt: str, steps: range, table: Sequence[int]) -> None:
        for step in steps:
            block = table[self.logical(layer, step)]
            for cell, what in self.cells(layer, step, block):
                self.content[block][cell] = (prompt, step, what)

    def wait_for(self, layer: int, prompt: str, tokens: int, logical: int, block: int) -> None:
        """Whatever comes of the layer's page of that block has to be the prompt's."""
        awaited = self.awaited.setdefault(block, {})
        each = len(self.worker.cells[layer])
        for step in range(logical * each, (logical + 1) * each):
            for cell, what in self.cells(layer, step, block):
                awaited[cell] = (prompt, step, what) if step * STEP < tokens else None

    def missing(self, layer: int, step: int, block: int) -> list[What]:
        """What of that step of a prompt's tokens has not come."""
        awaited = self.awaited[block]
        return [what for cell, what in self.cells(layer, step, block) if cell in awaited]
