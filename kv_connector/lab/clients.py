"""Clients that send one prompt after another in the background, and record the outcome of each."""

import random
import threading
from types import TracebackType
from typing import Self

from kv_connector.lab.completion import CompletionError, complete

# Lengths from a few blocks to a few chunks. Each prompt is sent repeatedly, and has one right answer.
PROMPT_TOKENS = (40, 150, 333, 500, 700, 900)
OUTPUT_TOKENS = 24
# Pause between two prompts of a client. Without it four clients take both cores of a small machine. An engine
# that starts needs those cores for three minutes.
PAUSE_SECONDS = 0.5
ANSWER_SECONDS = 60.0


class Clients:
    """Clients that send requests to `url` until the `with` block is left, each on its own thread."""

    def __init__(self, url: str, count: int = 2) -> None:
        self._url = url
        self._changed = threading.Condition()
        self._leaving = threading.Event()
        self._expected: dict[int, list[int]] = {}  # the first answer by prompt
        self.answered = 0
        self.failures: list[str] = []
        """The problem of each request whose answer was incomplete or differed from the first one."""
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
        """Blocks until ``more`` further requests have been answered. TimeoutError: they were not."""
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
