"""Draws docs/pictures/rooms.svg and floors.svg from the tables of rooms that the tests enforce.

    .venv/bin/python scripts/rooms_picture.py            (--check: checks that both are up to date)

The tables are in tests/support/rooms.py.

A room is above all rooms that it imports. A line is an import. Imports that follow from others are not drawn.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Set
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests" / "support"))

from rooms import FLOORS, IN_WORDS, NATIVE_ROOMS, ROOMS, ROUTER  # noqa: E402
from svg_page import page, write  # noqa: E402

PACKAGE, DRAWN = ROOT / "kv_connector", ROOT / "docs" / "pictures"
# In units of the picture. A box holds 24 letters of its second line, and is narrower if a floor has many
# boxes.
WIDTH, BOX, GAP, HEIGHT, FLOOR, MARGIN = 1120, 160, 10, 44, 84, 16
LABEL = "Rooms and their imports"
STYLE = """
  text { font-family: system-ui, sans-serif; text-anchor: middle; fill: #1c2430 }
  .name { font-size: 14px; font-weight: 600 } .words { font-size: 11px; fill: #46505e }
  .part { font-size: 12px; text-anchor: start; fill: #46505e }
  rect { fill: #eef3fa; stroke: #7a93b8 } .native rect { fill: #f6f1e7; stroke: #b39b6b }
  path { fill: none; stroke: #9aa5b4; stroke-width: 1.2 } .page { fill: #ffffff; stroke: none }
"""


def below(rooms: Mapping[str, Set[str]], name: str) -> set[str]:
    """Returns all rooms that a room imports, directly or not."""
    near = rooms.get(name, set())
    return set(near).union(*(below(rooms, other) for other in near))


def drawn(rooms: Mapping[str, Set[str]], name: str) -> list[str]:
    """Returns the imports of a room that do not follow from its other imports."""
    near = rooms.get(name, set())
    return sorted(near - set().union(*(below(rooms, other) for other in near)))


def floors(rooms: Mapping[str, Set[str]]) -> list[list[str]]:
    """Returns the rooms by their longest path to the bottom, the lowest floor first."""

    def height(name: str) -> int:
        return max((height(other) + 1 for other in rooms.get(name, set())), default=0)

    names = sorted(set(rooms).union(*rooms.values()))
    heights = {name: height(name) for name in names}
    made = [[name for name in names if heights[name] == level] for level in range(max(heights.values()) + 1)]
    place: dict[str, float] = {name: i for row in made for i, name in enumerate(row)}
    for _ in range(8):  # each room over the middle of its imports, then under its importers
        for near in (lambda n: drawn(rooms, n), lambda n: [o for o in names if n in drawn(rooms, o)]):
            for row in made:
                width = len(row)
                middle = {
                    name: sum(place[o] for o in near(name)) / len(near(name)) if near(name) else place[name]
                    for name in row
                }
                row.sort(key=lambda name: (middle[name], name))
                place |= {name: (i + 0.5) / width for i, name in enumerate(row)}
    return made


def draw(rooms: Mapping[str, Set[str]], title: str, top: int, kind: str) -> tuple[list[str], int]:
    """Returns the lines of a part of the picture, and its lower end."""
    made = floors(rooms)
    where: dict[str, tuple[float, float]] = {}
    boxes: dict[str, float] = {}
    for level, row in enumerate(reversed(made)):
        for i, name in enumerate(row):
            boxes[name] = min(BOX, WIDTH / len(row) - GAP)
            where[name] = (WIDTH * (i + 0.5) / len(row), top + 30 + level * FLOOR)
    lines = [f'<g class="{kind}">', f'<text class="part" x="{MARGIN}" y="{top + 16}">{escape(title)}</text>']
    for name, (x, y) in where.items():
        for other in drawn(rooms, name):
            to_x, to_y = where[other]
            bend = (to_y - y - HEIGHT) / 2
            # A line straight down over a floor is led around the box in its way.
            aside = 125 if to_y - y > FLOOR and abs(to_x - x) < BOX else 0
            lines.append(
                f'<path d="M{x:.0f},{y + HEIGHT:.0f} C{x + aside:.0f},{y + HEIGHT + bend:.0f} '
                f'{to_x + aside:.0f},{to_y - bend:.0f} {to_x:.0f},{to_y:.0f}"/>'
            )
    for name, (x, y) in where.items():
        box, short = boxes[name], name.removeprefix("providers/")
        lines += [
            f'<rect x="{x - box / 2:.0f}" y="{y:.0f}" width="{box:.0f}" height="{HEIGHT}" rx="6"/>',
            f'<text class="name" x="{x:.0f}" y="{y + 19:.0f}">{escape(short)}</text>',
            f'<text class="words" x="{x:.0f}" y="{y + 35:.0f}">{escape(IN_WORDS.get(name, ""))}</text>',
        ]
    return [*lines, "</g>"], top + 30 + len(made) * FLOOR


def picture() -> str:
    package, end = draw(ROOMS, "kv_connector", 0, "package")
    router, end = draw(ROUTER, "kv_connector/router", end, "package")
    native, end = draw(
        NATIVE_ROOMS, "native, and native/providers (the lanes and their factory)", end, "native"
    )
    return page(WIDTH, end, LABEL, STYLE, [*package, *router, *native])


def floors_picture() -> str:
    """Returns the picture of FLOORS: a row is a floor, and a coloured box is a folder."""
    step, box_height, top = 38, 30, 0
    lines: list[str] = []
    for room, made in FLOORS.items():
        lines.append(f'<text class="part" x="{MARGIN}" y="{top + 16}">kv_connector/{room}</text>')
        for level, row in enumerate(reversed(made)):
            y = top + 28 + level * step
            box = min(BOX, WIDTH / len(row) - GAP)
            for i, name in enumerate(row):
                x = WIDTH * (i + 0.5) / len(row)
                folder = (PACKAGE / room / name).is_dir()
                lines += [
                    f'<g class="{"package" if folder else "native"}">'
                    f'<rect x="{x - box / 2:.0f}" y="{y}" width="{box:.0f}" height="{box_height}" rx="6"/>'
                    f'<text class="{"name" if folder else "words"}" x="{x:.0f}" y="{y + 20}">'
                    f"{name}{'/' if folder else ''}</text></g>"
                ]
        top += 28 + len(made) * step + GAP
    return page(WIDTH, top, LABEL, STYLE, lines)


def pictures() -> dict[Path, str]:
    """Returns the contents of each file."""
    return {DRAWN / "rooms.svg": picture(), DRAWN / "floors.svg": floors_picture()}


def main(words: list[str]) -> None:
    write(pictures(), "rooms_picture", words)


if __name__ == "__main__":
    main(sys.argv[1:])
