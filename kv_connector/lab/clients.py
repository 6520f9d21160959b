"""Clients: they ask one prompt after another, in the background, and note what became of each."""

import random
import threading
from types import TracebackType
from typing import Self

from kv_connector.lab.completion import CompletionError, complete

# Of a few blocks to a few chunks. Each prompt is asked again and again, and has one right answer.
PROMPT_TOKENS = (40, 150, 333, 500, 700, 900)
OUTPUT_TOKENS = 24
# Between two prompts of a client. Without it four of them take both cores of a small machine, where an
# engine that starts needs them for three minutes.
PAUSE_SECONDS = 0.5
ANSWER_SECONDS = 60.0


class Clients:
    """Ask `url` until the `with` block is left, each of them from a thread of its own."""

    def __init__(self, url: str, count: int = 2) -> None:
        self._url = url
        self._changed = threading.Condition()
        self._leaving = threading.Event()
        self._expected: dict[int, list[int]] = {}  # by prompt: its first answer
        self.answered = 0
        self.failures: list[str] = []
        """The words of each request that got no whole answer, or another one than at first."""
        self._threads = [threading.Thread(target=self._ask, args=(random.Random(n),)) for n in range(count)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leaving.set()
        for thread in self._threads:
            thread.join()

    def wait_answered(self, more: int, seconds: float = ANSWER_SECONDS) -> None:
        """Blocks until so many further requests have been answered; TimeoutError where they are not."""
        with self._changed:
            wanted = self.answered + more
            if not self._changed.wait_for(lambda: self.answered >= wanted, seconds):
                raise TimeoutError(
                    f"fewer than {more} answers within {seconds:g} s; failed: {self.failures[-3:]}"
                )

    def _ask(self, random_numbers: random.Random) -> None:
        while not self._leaving.is_set():
            tokens = random_numbers.choice(PROMPT_TOKENS)
            try:
                answer = complete(self._url, _prompt(tokens), max_tokens=OUTPUT_TOKENS).tokens
            except CompletionError as error:
                self._note(str(error))
            else:
                right = answer == self._expected.setdefault(tokens, answer)
                self._note("" if right else f"another answer to {tokens} tokens than at first")
            self._leaving.wait(PAUSE_SECONDS)

    def _note(self, problem: str) -> None:
        with self._changed:
            if problem:
                self.failures.append(problem)
            else:
                self.answered += 1
            self._changed.notify_all()


def _prompt(tokens: int) -> list[int]:
    return random.Random(tokens).choices(range(256), k=tokens)
