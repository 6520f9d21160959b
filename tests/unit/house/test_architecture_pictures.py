"""The pictures of docs/architecture.md that a script draws: they are up to date."""

from __future__ import annotations

import architecture_pictures
import pytest


@pytest.mark.parametrize("name", [path.name for path in architecture_pictures.pictures()])
def test_the_picture_is_up_to_date(name: str) -> None:
    path = architecture_pictures.PICTURES / name
    assert path.read_text() == architecture_pictures.pictures()[path]


def test_a_stale_picture_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architecture_pictures, "REQUEST", architecture_pictures.REQUEST[:-1])
    with pytest.raises(SystemExit, match=r"request\.svg is out of date"):
        architecture_pictures.main(["--check"])
