"""The board's file equals the output of its generator."""

from pathlib import Path

import board

FILE = Path(board.__file__).with_name("board.json")


def test_the_file_is_the_generators() -> None:
    assert FILE.read_text() == board.render(), "run: make board"
