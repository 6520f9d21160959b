"""Engines of several checkpoints under one model name: what they register, and what the router shows."""

from __future__ import annotations

import json
import logging
from typing import Any

import msgspec
import pytest
from checkpoints import BASE, QUANTISED, TUNED
from stream_site import BODY, COMPLETION, StreamReading, alone, site

from kv_connector.control.membership import Register, decode, encode
from kv_connector.protocol.session.checkpoint import Checkpoint, Weights
from kv_connector.protocol.wire.messages import MalformedMessage, Role
from kv_connector.router.engines.incidents import Incidents
from kv_connector.router.engines.members import Members, Side
from kv_connector.router.engines.pool import Pool
from kv_connector.router.front.status import Status
from kv_connector.router.front.unlike_checkpoints import UnlikeCheckpoints
from kv_connector.router.observe.metrics import Metrics

REGISTER = Register("d", "1", Role.DECODE, "http://d:8000", "d", 5600)


# --- The registration


def test_registration_has_the_checkpoint_if_it_is_known() -> None:
    known = msgspec.structs.replace(REGISTER, checkpoint=QUANTISED)
    assert decode(encode(known)) == known
    # As an engine of an earlier release sends it. An earlier router reads it, too.
    assert b"checkpoint" not in encode(REGISTER)
    assert decode(encode(REGISTER)) == REGISTER


@pytest.mark.parametrize(
    "checkpoint", [["", ""], ["", "a" * 65], ["x" * 257, "3f2a"], ["", "3f2a", ""], "3f2a"]
)
def test_registration_with_another_form_of_the_checkpoint_is_malformed(checkpoint: Any) -> None:
    fields = msgspec.msgpack.decode(encode(REGISTER)) | {"checkpoint": checkpoint}
    with pytest.raises(MalformedMessage):
        decode(msgspec.msgpack.encode(fields))


class CheckpointFleet:
    """Engines that register, and the router's look at their checkpoints."""

    def __init__(self) -> None:
        self.members = Members({side: Pool() for side in Side}, {}, Incidents(), suspect=3.0, dead=5.0)
        self.unlike = UnlikeCheckpoints(self.members)

    def register(
        self, name: str, checkpoint: Checkpoint | None, models: frozenset[str] | None, weights: str = ""
    ) -> None:
        role = Role.PREFILL if name[0] == "p" else Role.DECODE
        message = Register(
            name, "1", role, f"http://{name}:8000", name, 5600, weights=weights, checkpoint=checkpoint
        )
        self.members.learnt(self.members.register(0.0, message), models)


def test_router_logs_once_that_a_model_has_two_checkpoints(caplog: pytest.LogCaptureFixture) -> None:
    fleet, models = CheckpointFleet(), frozenset({"m"})
    fleet.register("p1", BASE, models)
    fleet.register("d1", BASE, models)
    fleet.register("d2", TUNED, frozenset({"n"}))
    fleet.register("d3", QUANTISED, models)
    fleet.register("d4", None, models)
    fleet.register("d5", TUNED, models, "v1")
    fleet.unlike.look()
    assert not caplog.records, "no two of them differ under one name"
    for _ in range(2):
        fleet.register("d2", TUNED, frozenset({"m", "n"}))
        for _ in range(2):
            fleet.unlike.look()
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert record.getMessage().startswith(
            "UNLIKE CHECKPOINTS: model m is served from 3f2a (1 prefill, 1 decode), 91bc (1 decode)."
        )
        caplog.clear()
        fleet.register("d2", BASE, models)
        fleet.unlike.look()
        assert not caplog.records


def test_router_compares_no_engines_whose_models_are_unknown(caplog: pytest.LogCaptureFixture) -> None:
    fleet = CheckpointFleet()
    fleet.register("p1", BASE, None)
    fleet.register("d1", TUNED, None)
    fleet.unlike.look()
    assert not caplog.records, "they may serve two models"


def test_model_and_its_adapters_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    fleet, models = CheckpointFleet(), frozenset(f"m{n:03}" for n in range(20)) | {"m999" + "x" * 500}
    fleet.register("p1", BASE, models)
    fleet.register("d1", TUNED, models)
    fleet.unlike.look()
    (record,) = caplog.records
    assert "model m000, m001, m002, m003, m004, m005, m006, m007 and 13 more is served" in record.getMessage()
    fleet.register("d2", TUNED, models | {"n"})
    fleet.unlike.look()
    assert len(caplog.records) == 1, "only once"


@pytest.mark.parametrize("details", [True, False])
def test_status_shows_the_checkpoint_to_operators_only(details: bool) -> None:
    fleet = CheckpointFleet()
    fleet.register("d1", TUNED, None)
    fleet.register("d2", None, None)
    status = Status(fleet.members, Metrics(), Incidents(), details=details)
    known, unknown = json.loads(status.json())["engines"]
    assert known.get("checkpoint") == ("91bc" if details else None)
    assert "checkpoint" not in unknown


# --- Streams


@pytest.mark.anyio
async def test_stream_moves_to_another_checkpoint_without_its_old_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with site() as s:
        tuned = Weights("", TUNED), Weights("", BASE)
        monkeypatch.setattr(Pool, "weights", lambda _, engine: tuned[engine.url == s.first.url])
        reading = StreamReading(s.client, COMPLETION, BODY)
        await reading.until(7)
        await s.drain(s.first)
        events = await reading.end()
        s.first.limits = (10**6, 10**6)
        assert events == await alone(s.first, COMPLETION, BODY)
        assert await s.outcomes() == {"moved": 1}
        assert len(s.first.bodies) == 2, "the stream, and the same without a router"
        (continued,) = s.second.bodies
        assert "kv_transfer_params" not in continued
        assert 'local_prefills_total{reason="other_weights"} 1.0' in (await s.client.get("/metrics")).text
