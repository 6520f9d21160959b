"""How far the forward pass of a step has come, as the transfer engine's LayerSignal has it."""

from __future__ import annotations

from collections.abc import Callable

from kv_connector.engine.transfer_engine import LayerSignal, StreamSignal


class LayerProgress:
    """Tells the engine's LayerSignal how far the forward pass has come.

    The signal only grows: step s of an engine with L layers takes the values s*L+1 to s*L+L, and reaches
    s*L+k once the first k layers of ``order`` are computed. Names do not say in which order layers are
    computed (a drafter's come after the model's), or which have no hook (an indexer's cache). So the order is
    that of the last step's hooks, and layers whose hooks did not come are behind them. A step that goes
    another way is late, never early: no layer is signalled before its hook, or the end of the step.

    Where nobody waits for single layers, only the last one is signalled: with a store for each layer a hook
    takes 28 us of the thread that launches the step (H200).
    """

    def __init__(self, layer_names: tuple[str, ...], store: Callable[[int], None]) -> None:
        self._ordinals = {name: ordinal for ordinal, name in enumerate(layer_names)}
        self._store = store
        self._steps = 0
        self._done = len(layer_names)
        self._hooked: dict[int, None] = {}  # the ordinals of this step's hooks, in their order
        self._before_last: Callable[[], None] = lambda: None
        self._by_layer = True
        self._abandoned = False
        self.base = 0
        self.order = tuple(range(len(layer_names)))
        """The layers' ordinals, as this step's signal counts them."""

    def begin_step(self, before_last: Callable[[], None], *, by_layer: bool) -> bool:
        """Whether ``order`` is another from this step on. ``before_last`` is called once, just before the
        step's last layer is signalled. ``by_layer``: somebody waits for the single layers."""
        came = tuple(self._hooked)
        changed = came != self.order[: len(came)]
        if changed:
            self.order = came + tuple(ordinal for ordinal in self.order if ordinal not in self._hooked)
        self.base = self._steps * len(self._ordinals)
        self._steps += 1
        self._done = 0
        self._hooked = {}
        self._before_last = before_last
        self._by_layer = by_layer
        return changed

    def layer_computed(self, name: str) -> None:
        ordinal = self._ordinals.get(name)
        if ordinal is None or self.ended:
            return
        self._hooked[ordinal] = None
        done = self._done
        while done < len(self.order) and self.order[done] in self._hooked:
            done += 1
        if done > self._done:
            self._advance(done)

    @property
    def ended(self) -> bool:
        """Whether all layers of the last step that began are signalled, or abandoned."""
        return self._done == len(self.order)

    def end_step(self) -> None:
        if not self.ended:
            self._advance(len(self.order))

    def abandon(self) -> None:
        """Signals nothing from now on, because a forward pass raised.

        Its remaining layers are not computed, and any later value would release their pages. The framework
        ends such an engine.
        """
        self._abandoned = True
        self._done = len(self.order)

    def _advance(self, done: int) -> None:
        self._done = done
        if self._abandoned:
            return
        last = done == len(self.order)
        if last:
            self._before_last()
        if last or self._by_layer:
            self._store(self.base + done)


def signal_writer(
    signal: LayerSignal, current_stream: Callable[[], int], note: Callable[[int], None] | None = None
) -> Callable[[int], None]:
    """What a layer hook calls with the signal's next value.

    On a CPU engine the layer is computed when its hook is called. On a GPU it is only enqueued: there the
    value is enqueued behind it, on the stream that the forward pass uses at that moment, and nobody waits.
    ``note``: called with each value at which a layer is computed, on a CPU engine.
    """
    if not isinstance(signal, StreamSignal):
        return signal.store if note is None else _noted(signal.store, note)
    store = signal.store_on_stream
    return lambda value: store(current_stream(), value)


def _noted(store: Callable[[int], None], note: Callable[[int], None]) -> Callable[[int], None]:
    def write(value: int) -> None:
        note(value)
        store(value)

    return write
