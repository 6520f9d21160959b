"""Progress bars, one for each engine, while weights are written to it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

# Interval of updates, in seconds: as fast as the eye can follow.
_LOOK_S = 0.1


@contextmanager
def push_progress(look: Callable[[], Mapping[str, tuple[int, int]]], console: Console) -> Iterator[None]:
    """Shows the bars during a block. Does nothing if ``console`` is no terminal.

    ``look`` returns bytes written and bytes in all, by engine. It is called on a separate thread.
    """
    if not console.is_terminal:
        yield
        return
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=console) as progress:
        tasks = {engine: progress.add_task(engine, total=total) for engine, (_, total) in look().items()}
        over = threading.Event()

        def show() -> None:
            while True:
                last = over.wait(_LOOK_S)
                for engine, (done, _) in look().items():
                    progress.update(tasks[engine], completed=done)
                if last:
                    return

        thread = threading.Thread(target=show, name="push-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
