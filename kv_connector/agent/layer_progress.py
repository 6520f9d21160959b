"""The progress of a step's forward pass, as the transfer engine's LayerSignal shows it."""

from __future__ import annotations

from collections.abc import Callable

from kv_connector.engine.transfer_engine import LayerSignal, StreamSignal


class LayerProgress:
    """Reports the progress of the forward pass to the transfer engine's LayerSignal.

    The signal only grows. Step s of an engine with L layers takes the values s*L+1 to s*L+L, and reaches
    s*L+k once the first k layers of ``order`` are computed. Layer names show neither the order of computation
    (a drafter's layers come after the model's) nor which layers have no hook (an indexer's cache). So the
    order is that of the last step's hooks, followed by the layers without a hook call. If a step takes
    another order, layers are signalled late, but never early: no layer is signalled before its hook or the
    end of the step.

    If no transfer waits for single layers, only the last layer is signalled. A store for each layer takes 28
    us a hook on the thread that launches the step (H200).
    """

    def __init__(self, layer_names: tuple[str, ...], store: Callable[[int], None]) -> None:
        self._ordinals = {name: ordinal for ordinal, name in enumerate(layer_names)}
        self._store = store
        self._steps = 0
        self._done = len(layer_names)
        self._hooked: dict[int, None] = {}  # the ordinals of this step's hooks, in call order
        self._before_last: Callable[[], None] = lambda: None
        self._by_layer = True
        self._abandoned = False
        self.base = 0
        self.order = tuple(range(len(layer_names)))
        """The layers' ordinals, in the order in which this step's signal counts them."""

    def begin_step(self, before_last: Callable[[], None], *, by_layer: bool) -> bool:
        """Returns whether ``order`` differs from this step on. ``before_last`` is called once, just before
        the step's last layer is signalled. ``by_layer``: whether a transfer waits for the single layers."""
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
        """Whether all layers of the last begun step are signalled or abandoned."""
        return self._done == len(self.order)

    def end_step(self) -> None:
        if not self.ended:
            self._advance(len(self.order))

    def abandon(self) -> None:
        """Stops all signalling, because a forward pass raised.

        The remaining layers are not computed, and any later value would release their pages. The framework
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
    """The function that a layer hook calls with the signal's next value.

    On a CPU engine the layer is computed when its hook is called. On a GPU it is only enqueued. The value is
    then enqueued behind it, on the stream that the forward pass uses at that moment, and nothing waits.
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
