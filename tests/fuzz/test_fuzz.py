"""The fuzzers at CI's size. `make fuzz` runs them for any length."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.fuzz.campaign import feed_block
from tests.fuzz.live import attack
from tests.fuzz.targets import PYTHON_TARGETS, Target, native_targets

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("target", PYTHON_TARGETS, ids=lambda target: target.name)
def test_decoders_take_or_refuse_whatever_comes(target: Target) -> None:
    """Each input is accepted or refused. Both must occur, because otherwise the inputs would prove
    nothing."""
    counts: Counter[str] = Counter()
    for block in range(5):
        feed_block(target, "ci", block, counts)
    assert counts[f"{target.name} taken"] > 50
    assert counts[f"{target.name} refused"] > 50


@pytest.mark.parametrize("target", PYTHON_TARGETS, ids=lambda target: target.name)
@settings(max_examples=200)
@example(data=b"")
@given(data=st.binary(max_size=500))
def test_decoders_take_or_refuse_any_bytes(target: Target, data: bytes) -> None:
    target.feed(data)


def test_every_valid_input_is_taken() -> None:
    for target in PYTHON_TARGETS:
        assert all(target.feed(data) for data in target.corpus)


@pytest.mark.parametrize("lane", ["sim", "host", "tcp"])
def test_handshakes_of_the_native_engine(lane: str) -> None:
    counts: Counter[str] = Counter()
    with native_targets([lane]) as targets:
        for target in targets:
            feed_block(target, "ci", 0, counts)
            assert counts[f"{target.name} refused"] > 50


def test_raw_connections_to_a_live_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_connector.control.sockets._HANDSHAKE_MS", 300)
    assert len(list(attack("ci", 300))) == 2


def test_nothing_is_unpickled() -> None:
    """A pickle runs code that its sender chooses. vLLM pickles between its own processes; the connector never
    does."""
    words = ("import pickle", "pickle.loads", "import marshal", "import dill", "cloudpickle", "recv_pyobj")
    for source in (ROOT / "kv_connector").rglob("*.py"):
        text = source.read_text()
        assert not [word for word in words if word in text], source
