"""The parts that all drawn pictures share: an SVG page, and the check that files are up to date."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path


def page(width: int, height: int, label: str, style: str, lines: Sequence[str], definitions: str = "") -> str:
    """Returns a whole SVG file. ``definitions``: elements that the lines refer to."""
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(label)}">'
    paper = f'<rect class="page" width="{width}" height="{height}"/>'
    return "\n".join([head, f"{definitions}<style>{style}</style>", paper, *lines, "</svg>", ""])


def write(pictures: Mapping[Path, str], script: str, words: Sequence[str]) -> None:
    """Writes the pictures. ``--check`` in ``words``: writes none, and exits with status 1 if one differs."""
    for path, text in pictures.items():
        if list(words) != ["--check"]:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            sys.exit(f"{script}: {path} is out of date: run scripts/{script}.py")
