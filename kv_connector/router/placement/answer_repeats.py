"""AnswerRepeats: whether the next turns of conversations have the token ids of answers.

A decode engine has the KV of the ids that it has generated. The next turn has the answer's text, from which
a chat template and a tokenizer make ids again. Some templates write answers otherwise than models do, for
example tool calls, or begin an answer with an empty thinking part that the next turn lacks. Random models
generate bytes that are no text.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple, Self

from kv_connector.router.bodies.prompt import Prompt
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.pool import Lease
from kv_connector.router.requests.transcript import Said

# Weight of the latest turn. Six turns without the answer's ids, or as many with them, change the forecast.
_LATEST = 1 / 8
# Answers whose next turn has still to come, the latest ones. Each takes 0.4 KB (tracemalloc, 2026-11-30), so
# all take 6.3 MB.
MOST_ANSWERS = 1 << 14
# Kinds of answers with a share. Fine-tunings, each with its own name, may come and go.
_MOST_KINDS = 4096
# Templates end a prompt with the beginning of the answer's message, up to so many tokens, which the next turn
# may lack.
_HEADER_TOKENS = 64


class AnswerKind(NamedTuple):
    """Answers that are repeated alike."""

    model: str
    form: str
    """Form of the prompt, as of prompt.Tail."""
    calls: bool
    """Whether the answer calls tools."""
    thinks: bool
    """Whether the answer has a thinking part."""

    @classmethod
    def of(cls, prompt: Prompt, said: Said) -> Self:
        return cls(prompt.model, prompt.tail.form, said.calls, said.thinks)


class _Answer(NamedTuple):
    """An answer whose next turn has still to come."""

    kind: AnswerKind
    engine: Endpoint
    """The engine that has its KV."""
    prompt: int
    """Tokens of its prompt, by the engine's count."""
    before: int
    """Bytes of the prompt's prefixes."""
    nbytes: int
    """Bytes of the answer."""


class AnswerRepeats:
    """Learns from the decode engines' hits. Used from the event loop's thread only."""

    def __init__(self) -> None:
        self._shares: OrderedDict[AnswerKind, float] = OrderedDict()
        """Share of the latest turns that had the ids of the answer, in the order of their last use."""
        self._answers: OrderedDict[int, _Answer] = OrderedDict()
        """Answers by the last prefix of prompt and answer, in the order in which they came."""

    def expected(self, kind: AnswerKind) -> bool:
        """Returns whether the next turn is expected to have the ids of such an answer."""
        return self._shares.get(kind, 1.0) >= 1 / 2

    def answered(
        self, kind: AnswerKind, engine: Endpoint, tokens: int, prompt: Prompt, continued: Prompt
    ) -> None:
        """Notes an answer. ``tokens``: those of its prompt. ``continued``: prompt and answer."""
        if kind.form.startswith(","):
            return  # A client that sends token ids repeats them. An engine without them has dropped them.
        before = len(prompt.prefixes)
        if tokens < 1 or not prompt.measurable or len(continued.prefixes) == before:
            return
        one = _Answer(kind, engine, tokens, prompt.bytes_of(before), continued.size - prompt.size)
        self._answers[continued.prefixes[-1]] = one
        if len(self._answers) > MOST_ANSWERS:
            self._answers.popitem(last=False)

    def reported(self, lease: Lease, tokens: int, cached: int) -> None:
        """Takes a decode engine's count of a prompt of so many tokens. ``cached``: those that it had."""
        prompt = lease.prompt
        if prompt is None or not prompt.measurable or not self._answers:
            return
        last = next((one for one in reversed(prompt.prefixes) if one in self._answers), None)
        if last is None:
            return
        answer = self._answers.pop(last)
        # The engine is another one, or was expected to have dropped a part of the turn before.
        if answer.engine != lease.endpoint or lease.expected < answer.before:
            return
        hit = lease.workload.hit
        # Bytes show the answer's tokens only roughly, so its first half decides.
        half = hit(answer.prompt + tokens * answer.nbytes // prompt.size // 2)
        if half == hit(answer.prompt) or cached < hit(max(0, answer.prompt - _HEADER_TOKENS)):
            return  # the half is within a block of the prompt, or the engine has dropped a part of the prompt
        share = self._shares.pop(answer.kind, 1.0)
        self._shares[answer.kind] = share + _LATEST * ((cached >= half) - share)
        if len(self._shares) > _MOST_KINDS:
            self._shares.popitem(last=False)
