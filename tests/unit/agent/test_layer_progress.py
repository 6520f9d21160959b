"""The progress of a step's signal, by the hooks that are called."""

from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_connector.agent.layer_progress import LayerProgress, signal_writer
from kv_connector.engine.transfer_engine import LayerSignal, StreamSignal

LAYERS = ("layers.0", "layers.1", "layers.2")
# By name a drafter comes before the model whose tokens it continues. An indexer's cache has no hook.
TANGLED = ("draft.0", "layers.0", "layers.0.indexer", "layers.1")
HOOKED = ("layers.0", "layers.1", "draft.0")


def step(progress: LayerProgress, hooks: tuple[str, ...], *, by_layer: bool = True) -> bool:
    changed = progress.begin_step(lambda: None, by_layer=by_layer)
    for name in hooks:
        progress.layer_computed(name)
    progress.end_step()
    return changed


@pytest.mark.parametrize(
    ("hooks", "stores"),
    [
        ((), [3]),
        (LAYERS[:1], [1, 3]),
        ((LAYERS[1], LAYERS[0], LAYERS[2]), [2, 3]),
        ((*LAYERS, LAYERS[2]), [1, 2, 3]),
        ((LAYERS[0], "draft.layers.9", LAYERS[1]), [1, 2, 3]),
    ],
    ids=["none", "first", "out of order", "twice", "unknown"],
)
def test_unsignalled_layers_are_signalled_at_the_end_of_the_step(
    hooks: tuple[str, ...], stores: list[int]
) -> None:
    stored: list[int] = []
    step(LayerProgress(LAYERS, stored.append), hooks)
    assert stored == stores


def test_abandoned_progress_signals_no_layer_of_this_step_or_a_later_one() -> None:
    stored: list[int] = []
    ended = Mock()
    progress = LayerProgress(LAYERS, stored.append)
    progress.begin_step(ended, by_layer=True)
    progress.layer_computed(LAYERS[0])
    progress.abandon()
    step(progress, LAYERS)
    assert stored == [1]
    ended.assert_not_called()


def test_only_the_last_layer_is_signalled_when_no_transfer_waits_for_single_layers() -> None:
    stored: list[int] = []
    progress = LayerProgress(TANGLED, stored.append)
    step(progress, HOOKED, by_layer=False)
    assert stored == [4]
    assert step(progress, HOOKED, by_layer=False), "their order is known all the same"
    step(progress, HOOKED)
    assert stored == [4, 8, 9, 10, 11, 12]


@pytest.mark.parametrize("hooks", [(), HOOKED[:2]], ids=["full graph", "without the drafter"])
def test_a_step_with_fewer_hooks_leaves_the_order_as_it_is(hooks: tuple[str, ...]) -> None:
    stored: list[int] = []
    progress = LayerProgress(TANGLED, stored.append)
    assert [step(progress, came) for came in (HOOKED, hooks)] == [False, True]
    assert progress.order == (1, 3, 0, 2)
    stored.clear()
    assert not step(progress, HOOKED)
    assert stored == [9, 10, 11, 12]


# A hybrid model: recurrent states have no hook. They are before the attention layers, between them and behind
# them.
HYBRID = ("layers.0.state", "layers.1", "layers.2.state", "layers.3", "layers.4.state")
ATTENTION = ("layers.1", "layers.3")
STATES = {0, 2, 4}


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_layer_without_a_hook_is_signalled_when_the_step_is_over(steps: int) -> None:
    """It is not signalled with the next hook, wherever that layer stands. Names do not show the order of
    computation."""
    stored = [0]
    progress = LayerProgress(HYBRID, stored.append)

    def signalled() -> set[int]:
        return set(progress.order[: max(stored[-1] - progress.base, 0)])

    for _ in range(steps):
        progress.begin_step(lambda: None, by_layer=True)
        for name in ATTENTION:
            progress.layer_computed(name)
            assert not signalled() & STATES
        progress.end_step()
        assert signalled() == set(range(5))
    if steps > 1:
        assert progress.order == (1, 3, 0, 2, 4), "and holds up no other"


@given(st.lists(st.lists(st.integers(0, 3), max_size=6), min_size=2, max_size=6))
def test_no_layer_is_signalled_before_its_hook_or_the_steps_end(steps: list[list[int]]) -> None:
    stored = [0]
    progress = LayerProgress(TANGLED, stored.append)
    for hooks in steps:
        progress.begin_step(lambda: None, by_layer=True)
        came: set[int] = set()
        for ordinal in hooks:
            came.add(ordinal)
            progress.layer_computed(TANGLED[ordinal])
            signalled = progress.order[: max(stored[-1] - progress.base, 0)]
            assert came.issuperset(signalled)
        progress.end_step()
        assert sorted(progress.order) == [0, 1, 2, 3]
        assert stored[-1] == progress.base + 4
    assert stored == sorted(set(stored)), "the signal only grows"
    # If the next step takes the same order as the last one, no layer is delayed.
    progress.begin_step(lambda: None, by_layer=True)
    for position, ordinal in enumerate(dict.fromkeys(hooks), 1):
        progress.layer_computed(TANGLED[ordinal])
        assert stored[-1] == progress.base + position


def test_on_a_cpu_the_value_is_stored_at_once() -> None:
    signal = Mock(LayerSignal)
    signal_writer(signal, lambda: pytest.fail("there is no stream"))(7)
    signal.store.assert_called_once_with(7)


def test_on_a_gpu_the_value_is_stored_on_the_stream_of_the_moment() -> None:
    signal, streams = Mock(StreamSignal), iter([16, 32])
    write = signal_writer(signal, lambda: next(streams))
    write(7)
    write(8)
    assert [call.args for call in signal.store_on_stream.call_args_list] == [(16, 7), (32, 8)]
    signal.store.assert_not_called()
