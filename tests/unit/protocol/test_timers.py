"""The queue of deadlines, compared with a trivial implementation."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kv_connector.protocol.timers import Timers

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.integers(0, 5), st.integers(0, 20)),
        st.tuples(st.just("clear"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("pop"), st.just(0), st.integers(0, 20)),
    ),
    max_size=200,
)


@given(STEPS)
def test_deadlines_come_in_order_of_time_and_then_of_setting(steps: list[tuple[str, int, int]]) -> None:
    timers: Timers[int] = Timers()
    expected: dict[int, tuple[int, int]] = {}
    for number, (step, key, when) in enumerate(steps):
        if step == "set":
            timers.set(key, when)
            expected[key] = (when, number)
        elif step == "clear":
            timers.clear(key)
            expected.pop(key, None)
        else:
            due = [key for key, (time, _) in expected.items() if time <= when]
            first = min(due, key=lambda key: expected[key], default=None)
            assert timers.pop_due(when) == first
            if first is not None:
                del expected[first]
        assert timers.next() == min((time for time, _ in expected.values()), default=None)
        assert len(timers) == len(expected)


def test_deadlines_that_move_all_the_time_take_no_memory() -> None:
    timers: Timers[str] = Timers()
    for now in range(10_000):
        timers.set("heartbeat", float(now))
    assert len(timers._heap) < 100
    assert timers.next() == 9_999.0
