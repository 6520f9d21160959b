"""Draws two pictures of docs/architecture.md from tables in this file: a request in time, and the threads.

.venv/bin/python scripts/architecture_pictures.py        (--check: checks that the pictures are up to date)
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

from svg_page import page, write

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
STYLE = """
  text { font-family: system-ui, sans-serif; font-size: 12px; fill: #1c2430; text-anchor: middle }
  .name { font-size: 13px; font-weight: 600 } .beside { fill: #46505e }
  .left { text-anchor: start } .right { text-anchor: end }
  rect { fill: #eef3fa; stroke: #7a93b8 } .blocks rect { fill: #f6f1e7; stroke: #b39b6b }
  .page { fill: #ffffff; stroke: none }
  path { fill: none; stroke: #46505e; stroke-width: 1.2; marker-end: url(#end) }
  .life { stroke: #c3cad4; stroke-dasharray: 3 3; marker-end: none }
  .pages { stroke: #2f6db3; stroke-width: 3 }
"""
HEAD = """<marker id="end" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8"
  markerUnits="userSpaceOnUse" orient="auto">
<path d="M0,0 L8,4 L0,8 z" style="fill: #46505e; stroke: none; marker-end: none"/></marker>"""

# --- A request in time

# Places of the life lines, from the left.
ACTORS = {"router": 70, "P": 350, "D": 730}
TITLES = {"router": "router", "P": "P: scheduler side, worker side", "D": "D: scheduler side, worker side"}


@dataclass(frozen=True)
class Step:
    """A row of the picture: a message between two actors, or what one actor does."""

    source: str
    target: str
    message: str = ""
    then: str = ""
    """An action of the target after the message."""
    pages: bool = False


REQUEST = (
    Step("router", "P", "half of P"),
    Step("router", "D", "half of D", "allocates blocks and a counter"),
    Step("D", "P", "RESERVE: block table, the counter's immediate", "computes layer 1, 2, 3 ..."),
    Step("P", "D", "pages, by layer or burst", "each write raises the counter", pages=True),
    Step("P", "router", "first token"),
    Step("P", "D", "SAMPLED", "target reached: the request is schedulable"),
    Step("P", "P", then="last write completed: blocks free"),
    Step("D", "router", "remaining tokens"),
)


def request() -> str:
    """Returns the picture of a request in time."""
    height = 70 + 46 * len(REQUEST)
    lines = []
    for actor, x in ACTORS.items():
        width = 90 if actor == "router" else 230
        lines += [
            f'<path class="life" d="M{x},44 V{height - 8}"/>',
            f'<rect x="{x - width / 2:.0f}" y="14" width="{width}" height="30" rx="6"/>',
            f'<text class="name" x="{x}" y="34">{escape(TITLES[actor])}</text>',
        ]
    for row, step in enumerate(REQUEST):
        y = 84 + 46 * row
        begin, end = ACTORS[step.source], ACTORS[step.target]
        toward = 1 if end > begin else -1
        if step.message:
            kind = ' class="pages"' if step.pages else ""
            lines.append(f'<path{kind} d="M{begin + 4 * toward},{y} H{end - 4 * toward}"/>')
            # Near its source, as a long arrow crosses the life line of another actor.
            middle = begin + toward * min(abs(end - begin) / 2, 190)
            lines.append(f'<text x="{middle:.0f}" y="{y - 6}">{escape(step.message)}</text>')
        if step.then:
            lines.append(f'<text class="beside left" x="{end + 10}" y="{y + 16}">{escape(step.then)}</text>')
    label = "A request between the router, a prefill and a decode engine"
    return page(1010, height, label, STYLE, lines, f"<defs>{HEAD}</defs>")


# --- The threads of a transfer engine


@dataclass(frozen=True)
class Box:
    name: str
    words: str
    x: int
    y: int
    blocks: bool = False
    """Its calls may block."""


THREADS = {
    "user": Box("any thread", "the user's calls", 110, 60),
    "transfer": Box("transfer thread", "posts, polls, counts", 470, 60),
    "domain": Box("Domain", "one for each NIC", 850, 60),
    "control": Box("control thread", "makes and ends links", 470, 190, blocks=True),
    "connector": Box("Connector", "one for each NIC", 850, 190, blocks=True),
    "memory": Box("memory thread", "registers memory", 470, 300, blocks=True),
    "domain_thread": Box("domain thread", "if workers > 1: a ring each way", 470, 410),
    "own_domain": Box("Domain", "of its own NICs", 850, 410),
}


@dataclass(frozen=True)
class Arrow:
    source: str
    target: str
    words: str
    back: str = ""
    """Words of a second arrow, from the target to the source."""


ARROWS = (
    Arrow("user", "transfer", "commands", "events, counters"),
    Arrow("transfer", "domain", "post, poll", "completions"),
    Arrow("transfer", "control", "what may block", "what is finished"),
    Arrow("user", "control", "offer, accept, complete"),
    Arrow("user", "memory", "register_memory, deregister_memory"),
    Arrow("control", "connector", "calls that block"),
    Arrow("memory", "connector", "its register_memory"),
    Arrow("connector", "domain", "Registration, LinkEnd", "what is to end"),
    Arrow("domain_thread", "own_domain", "post, poll", "completions"),
)
BOX, HIGH = 210, 46


def threads() -> str:
    """Returns the picture of a transfer engine's threads."""
    lines = []
    for box in THREADS.values():
        lines += [
            '<g class="blocks">' if box.blocks else "<g>",
            f'<rect x="{box.x - BOX // 2}" y="{box.y - HIGH // 2}" width="{BOX}" height="{HIGH}" rx="6"/>',
            "</g>",
            f'<text class="name" x="{box.x}" y="{box.y - 3}">{escape(box.name)}</text>',
            f'<text class="beside" x="{box.x}" y="{box.y + 14}">{escape(box.words)}</text>',
        ]
    for arrow in ARROWS:
        lines += _between(THREADS[arrow.source], THREADS[arrow.target], arrow)
    label = "The threads of a transfer engine and what they exchange"
    return page(970, 450, label, STYLE, lines, f"<defs>{HEAD}</defs>")


def _between(source: Box, target: Box, arrow: Arrow) -> Iterator[str]:
    """Draws one arrow or two: side by side between boxes of a row or a column, around a corner otherwise."""
    if source.y == target.y:
        left, right = source.x + BOX // 2 + 2, target.x - BOX // 2 - 2
        up, down, middle = source.y - 8, source.y + 8, (left + right) // 2
        yield f'<path d="M{left},{up} H{right}"/><text x="{middle}" y="{up - 6}">{escape(arrow.words)}</text>'
        if arrow.back:
            yield f'<path d="M{right},{down} H{left}"/>'
            yield f'<text x="{middle}" y="{down + 16}">{escape(arrow.back)}</text>'
    elif source.x == target.x:
        toward = 1 if target.y > source.y else -1
        begin, end = source.y + toward * (HIGH // 2 + 2), target.y - toward * (HIGH // 2 + 2)
        left, right, middle = source.x - 8, source.x + 8, (begin + end) // 2 + 4
        yield f'<path d="M{left},{begin} V{end}"/>'
        yield f'<text class="right" x="{left - 6}" y="{middle}">{escape(arrow.words)}</text>'
        if arrow.back:
            yield f'<path d="M{right},{end} V{begin}"/>'
            yield f'<text class="left" x="{right + 6}" y="{middle}">{escape(arrow.back)}</text>'
    elif target.x > source.x and target.y > source.y:
        # Down from the source, then to the side of the target. Two arrows from one source keep apart.
        x, end = source.x - (target.y - 245) // 4, target.x - BOX // 2 - 2
        yield f'<path d="M{x},{source.y + HIGH // 2 + 2} V{target.y} H{end}"/>'
        yield f'<text class="left" x="{x + 10}" y="{target.y - 6}">{escape(arrow.words)}</text>'
    else:
        end = target.y + HIGH // 2 + 2
        yield f'<path d="M{source.x + BOX // 2 + 2},{source.y} H{target.x} V{end}"/>'
        middle = (source.x + BOX // 2 + target.x) // 2
        yield f'<text x="{middle}" y="{source.y - 6}">{escape(arrow.words)}</text>'


# --- Both


def pictures() -> dict[Path, str]:
    """Returns the contents of each file."""
    return {PICTURES / "request.svg": request(), PICTURES / "threads.svg": threads()}


def main(words: list[str]) -> None:
    write(pictures(), "architecture_pictures", words)


if __name__ == "__main__":
    main(sys.argv[1:])
