"""A transfer's timeline: recorded by two agents, queried over their control sockets, drawn as a trace."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from agent_setup import AgentSide, acquaint, stage
from command_line import invoke
from protocol_setup import layout

from kv_connector.agent.reports.ledger import Timing
from kv_connector.agent.reports.timeline import Timelines
from kv_connector.cli.main import app
from kv_connector.cli.trace import chrome_trace
from kv_connector.control import timelines
from kv_connector.control.timelines import Unanswered, WorkerTimelines, ask_workers, boot_id
from kv_connector.engine import StepKind, TraceStep
from kv_connector.lab.free_ports import free_ports
from kv_connector.protocol.actions import Address, Ended, Outcome, Share
from kv_connector.protocol.wire.messages import MAX_MESSAGE_BYTES, Recall, Recalled, Role, decode, encode
from kv_connector.protocol.wire.timeline import MAX_COUNTS, MAX_TIMELINES

run = partial(invoke, app)

BLOCKS, TARGETS = (1, 2, 3), (11, 12, 13)


def transfer(p: AgentSide, d: AgentSide, name: str) -> None:
    """Three blocks, computed in two steps of P."""
    p.expect(name)
    d.reserve(p.address, TARGETS, name)
    p.compute(BLOCKS[:2], transfer=name)
    p.compute(BLOCKS[2:], first=2, transfer=name)
    p.agent.request_finished(name, ok=True)
    d.wait(received=[f"d-{name}"])
    p.wait(sent=[f"p-{name}"])


def ask(*sides: AgentSide, text: str = "", limit: int = MAX_TIMELINES) -> list[WorkerTimelines]:
    return ask_workers([side.address for side in sides], None, text, limit, 20.0)


def test_each_layer_is_computed_posted_and_landed_in_this_order_and_decode_counts_it() -> None:
    with stage("sim") as there:
        p, d = there.side(Role.PREFILL, timelines=4), there.side(Role.DECODE, timelines=4)
        transfer(p, d, "t")
        prefill, decode_ = ask(p, d)
    (sending,), (receiving,) = prefill.recalled.sent, decode_.recalled.received
    assert (sending.about.transfer_id, receiving.about.transfer_id) == ("t", "t")
    assert (sending.about.request_id, receiving.about.request_id) == ("p-t", "d-t")
    assert sending.about.outcome == receiving.about.outcome == "completed"
    assert sending.about.lane == receiving.about.lane == "sim"
    assert len(sending.steps) == 2
    assert sorted((span.layer, span.pages) for span in sending.spans) == [(0, 1), (0, 2), (1, 1), (1, 2)]
    for span in sending.spans:
        assert sending.steps[0] <= span.computed <= span.first_post <= span.last_post < span.landed
        assert sending.about.reserved <= span.landed <= sending.about.ended
    assert receiving.pages == receiving.counts[-1][1] == 6
    times = [receiving.about.reserved, *(when for when, _ in receiving.counts), receiving.about.ended]
    assert times == sorted(times)
    assert sending.nbytes == 6 * 64


def test_a_trace_has_a_row_for_each_layer_on_both_sides_and_arrows_between_them() -> None:
    with stage("sim") as there:
        p, d = there.side(Role.PREFILL, timelines=4), there.side(Role.DECODE, timelines=4)
        transfer(p, d, "t")
        drawn = chrome_trace(ask(p, d))
    events = json.loads(json.dumps(drawn))["traceEvents"]
    processes = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert set(processes) == {"prefill prefill/0", "decode decode/0"}
    rows = {e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 2}
    assert rows == {layer.name for layer in layout().layers}
    starts = {e["id"]: e["ts"] for e in events if e["ph"] == "s"}
    ends = {e["id"]: e["ts"] for e in events if e["ph"] == "f"}
    assert len(starts) == 4
    assert all(starts[arrow] <= ends[arrow] for arrow in starts)
    assert min(e["ts"] for e in events if "ts" in e) == 0
    assert [e for e in events if e["ph"] == "C"][-1]["args"] == {"pages": 6}
    assert drawn["otherData"]["clocks"]["prefill/0"]["error_us"] == 0


def test_the_newest_are_kept_and_an_id_or_a_part_of_it_chooses_among_them() -> None:
    with stage("sim") as there:
        p, d = there.side(Role.PREFILL, timelines=2), there.side(Role.DECODE, timelines=2)
        for name in ("one", "two", "three"):
            transfer(p, d, name)
        found = {
            asked: [
                sending.about.transfer_id
                for sending in ask(p, text=asked[0], limit=asked[1])[0].recalled.sent
            ]
            for asked in (("", 9), ("", 1), ("tw", 9), ("p-three", 9), ("one", 9))
        }
    assert found == {
        ("", 9): ["three", "two"],
        ("", 1): ["three"],
        ("tw", 9): ["two"],
        ("p-three", 9): ["three"],
        ("one", 9): [],
    }


def test_agent_without_the_timelines_setting_keeps_none_and_names_the_setting(tmp_path: Path) -> None:
    with stage("sim") as there:
        p, d = there.pair()
        transfer(p, d, "t")
        (worker,) = ask(p)
        assert worker.recalled.kept == 0
        assert worker.recalled.sent == ()
        status, output = run("trace", str(p.address), "--output", str(tmp_path / "trace.json"))
    assert status == 1
    assert '"timelines": 100' in output
    assert not (tmp_path / "trace.json").exists()


def test_the_command_writes_the_trace_of_the_request_that_is_named(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    with stage("sim") as there:
        p, d = there.side(Role.PREFILL, timelines=9), there.side(Role.DECODE, timelines=9)
        for name in ("one", "two"):
            transfer(p, d, name)
        status, output = run(
            "trace", str(p.address), str(d.address), "--request", "one", "--output", str(file)
        )
    assert status == 0
    assert "one" in output
    names = {event["name"] for event in json.loads(file.read_text())["traceEvents"] if event["ph"] == "b"}
    assert names == {"one"}


def test_transfer_end_is_reported_with_its_sizes_and_outcome() -> None:
    """The callback runs for spans, whether timelines are kept or not."""
    told: list[tuple[Ended, Timing]] = []
    with stage("sim") as there:
        p, d = there.pair()
        for side in (p, d):
            side.agent.report_ends(lambda ended, timing: told.append((ended, timing)))
        transfer(p, d, "t")
    by_side = {ended.side: (ended, timing) for ended, timing in told}
    assert len(told) == len(by_side) == 2
    for role, request in ((Role.PREFILL, "p-t"), (Role.DECODE, "d-t")):
        ended, timing = by_side[role]
        assert (ended.transfer_id, ended.request_id, ended.outcome) == ("t", request, Outcome.COMPLETED)
        assert (timing.lane, timing.pages) == ("sim", 6)
        assert ended.seconds == timing.seconds > timing.first_push_seconds
    assert by_side[Role.PREFILL][1].nbytes == 6 * 64


def test_every_worker_of_an_engine_is_queried() -> None:
    with stage("sim") as there:
        sides = [there.side(Role.PREFILL, rank=rank, ranks=2, timelines=1) for rank in (0, 1)]
        acquaint(sides)
        assert [worker.recalled.rank for worker in ask(sides[0])] == [0, 1]


def test_missing_engine_is_an_error_that_names_the_control_port(monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = free_ports(1)
    with pytest.raises(Unanswered, match="control_port"):
        ask_workers([Address("127.0.0.1", port)], None, "", 1, 0.1)
    monkeypatch.setattr("kv_connector.cli.trace.ANSWER_SECONDS", 0.1)
    status, output = run("trace", f"127.0.0.1:{port}")
    assert status == 2
    assert "no answer" in output


# --- Clocks


def recalled(host: str) -> Recalled:
    return Recalled("e", 0, Role.PREFILL, host, 0, 1, 0, (), (), (), ())


def test_workers_of_one_host_share_the_best_round_trip_and_the_local_host_needs_none() -> None:
    far = [WorkerTimelines(recalled("far"), 1_000_000, 300), WorkerTimelines(recalled("far"), 1_000_100, 90)]
    here = WorkerTimelines(recalled(boot_id()), 40, 50)
    assert timelines._aligned([*far, here]) == [
        replace(far[0], to_ours=1_000_100, error=90),
        far[1],
        replace(here, to_ours=0, error=0),
    ]


def test_a_time_namespace_of_our_host_is_measured() -> None:
    shifted = WorkerTimelines(recalled(boot_id()), 5_000_000, 50)
    assert timelines._aligned([shifted]) == [shifted]


# --- Timelines from the transfer engine's steps


class Steps:
    """A transfer engine, reduced to the steps that timelines read."""

    def __init__(self) -> None:
        self.taken: list[TraceStep] = []
        self.lost = 0
        self.started = 0

    def start_trace(self, steps: int) -> None:
        self.started = steps

    def take_trace(self) -> tuple[list[TraceStep], int]:
        taken, self.taken = self.taken, []
        lost, self.lost = self.lost, 0
        return taken, lost


def kept_by(engine: Steps, keep: int = 4, *, on_gpu: bool = False) -> Timelines:
    return Timelines(
        engine=engine,
        layout=layout(),
        addresses=[1000],
        keep=keep,
        engine_id="e",
        rank=0,
        role=Role.BOTH,
        host="h",
        on_gpu=on_gpu,
    )


def released(when: int, request: int, value: int, layer: int) -> TraceStep:
    source = 1000 + layout().layers[layer].parts[0].offset
    return TraceStep(StepKind.RELEASED, when, request, 5, value, source, 0)


def posted(when: int, request: int, pages: int = 1, kind: StepKind = StepKind.POSTED) -> TraceStep:
    return TraceStep(kind, when, request, 0, 0, 0, pages)


landed = partial(posted, kind=StepKind.LANDED)


def end(kept: Timelines, transfer_id: str = "t", side: Role = Role.PREFILL) -> None:
    over = Ended(side, transfer_id, 1, Outcome.COMPLETED, seconds=1.0, request_id="r")
    kept.ended(10.0, over, "peer", Timing(side, "tcp", 1.0))


def spans(kept: Timelines) -> Sequence[tuple[int, ...]]:
    (sending,) = kept.recalled(Recall("", 9), ()).sent
    return [(s.layer, s.computed, s.first_post, s.last_post, s.landed, s.pages) for s in sending.spans]


def test_the_writes_of_a_layer_in_one_step_are_one_span() -> None:
    engine = Steps()
    kept = kept_by(engine)
    kept.pushed(Share("t"), 5, 0)
    engine.taken = [
        released(20, 1, 1, 0),
        released(21, 2, 1, 0),
        posted(30, 1, 4),
        posted(40, 1),
        posted(50, 2),
    ]
    kept.look()
    engine.taken = [landed(60, 2), landed(70, 1, 4), landed(80, 1), landed(90, 77)]
    end(kept)
    assert spans(kept) == [(0, 20, 30, 50, 80, 6)]


def test_pages_that_waited_for_no_signal_are_distinguished_by_their_steps() -> None:
    engine = Steps()
    kept = kept_by(engine)
    for when in (20, 60):
        kept.pushed(Share("t"), 5, None)
        engine.taken = [released(when, 1, 0, 1), posted(when + 1, 1), landed(when + 2, 1)]
        kept.look()
    end(kept)
    assert spans(kept) == [(1, 20, 21, 21, 22, 1), (1, 60, 61, 61, 62, 1)]


@pytest.mark.parametrize("on_gpu", [False, True])
def test_layer_is_computed_at_its_hook_except_on_a_gpu(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the hook only enqueues, and the transfer thread sees the value that the stream has written. A
    layer without a hook is signalled with the next layer that has one."""
    engine = Steps()
    kept = kept_by(engine, on_gpu=on_gpu)
    kept.pushed(Share("t"), 5, 0)
    monkeypatch.setattr("kv_connector.agent.reports.timeline.time.monotonic_ns", lambda: 15)
    kept.signalled(2)
    engine.taken = [released(20, 1, 1, 0), released(21, 2, 2, 1)]
    end(kept)
    assert [span[1] for span in spans(kept)] == ([20, 21] if on_gpu else [15, 15])


def test_reused_address_belongs_to_the_later_transfer() -> None:
    engine = Steps()
    kept = kept_by(engine)
    kept.pushed(Share("t"), 5, 0)
    engine.taken = [released(20, 1, 1, 0), posted(21, 1), landed(22, 1)]
    kept.look()
    kept.pushed(Share("u"), 6, 0)
    engine.taken = [released(30, 1, 1, 0)._replace(transfer=6)]
    end(kept)
    assert spans(kept) == [(0, 20, 21, 21, 22, 1)]
    engine.taken = [posted(31, 1), landed(32, 1)]
    end(kept, "u")
    sent = kept.recalled(Recall("u", 9), ()).sent
    assert [(s.first_post, s.landed) for s in sent[0].spans] == [(31, 32)]


def test_long_counts_are_thinned_and_keep_their_end() -> None:
    engine = Steps()
    kept = kept_by(engine)
    kept.counter_opened("r", 9, 20_001)
    engine.taken = [TraceStep(StepKind.COUNTED, when, 9, 0, 0, 0, 1) for when in range(1, 20_002)]
    end(kept, side=Role.DECODE)
    (receiving,) = kept.recalled(Recall("", 9), ()).received
    assert len(receiving.counts) <= MAX_COUNTS
    assert receiving.counts[-1] == (20_001, 20_001)


def test_more_than_a_message_has_room_for_are_the_newest() -> None:
    engine = Steps()
    kept = kept_by(engine, keep=MAX_TIMELINES)
    for number in range(80):
        kept.counter_opened("r", 9, 4000)
        engine.taken = [TraceStep(StepKind.COUNTED, when << 40, 9, 0, 0, 0, 1) for when in range(1, 4001)]
        end(kept, f"t{number}", Role.DECODE)
    answer = kept.recalled(Recall("", MAX_TIMELINES), ())
    assert answer.received[0].about.transfer_id == "t79"
    assert 10 < len(answer.received) < 80
    frame = encode(answer)
    assert len(frame) < MAX_MESSAGE_BYTES
    assert decode(frame) == answer


def test_events_lost_by_the_engine_are_counted() -> None:
    engine = Steps()
    kept = kept_by(engine)
    engine.lost = 7
    kept.look()
    assert kept.recalled(Recall(), ()).lost == 7


def test_nothing_is_started_where_none_are_kept() -> None:
    engine = Steps()
    assert not kept_by(engine, keep=0).on
    assert engine.started == 0
    assert kept_by(engine).on
    assert engine.started > 0
