"""The generator's workloads: how many tokens each message of a conversation has, and when conversations
start."""

import random
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class ConversationShape:
    """The lengths of a workload. Lengths are in tokens."""

    conversations: int
    turns: int
    system: int
    """System prompt, equal in all conversations; 0: none."""
    first: int
    """First message of a conversation, behind the system prompt."""
    message: int
    """Each later message."""
    answer: int

    @property
    def last_prompt(self) -> int:
        """Prompt tokens of the last turn."""
        return self.system + self.first + (self.turns - 1) * (self.message + self.answer)


PRESETS = {
    "chat": ConversationShape(conversations=50, turns=8, system=2_000, first=300, message=300, answer=300),
    # Prompts grow from 60,000 to 139,989 tokens: 39 times an answer and a tool's output.
    "agent": ConversationShape(
        conversations=10, turns=40, system=10_000, first=50_000, message=1_651, answer=400
    ),
    # 5,178 prompt tokens a conversation, of which 1,318 are not in the prompt of the turn before.
    "small": ConversationShape(conversations=20, turns=6, system=0, first=408, message=124, answer=58),
}


@dataclass(frozen=True)
class Pace:
    """The start of conversations. Exactly one of ``at_once`` and ``rate`` is set."""

    at_once: int = 0
    """Closed loop: conversations in flight at any time."""
    rate: float = 0.0
    """Open loop: mean number of conversations that start per second, as a Poisson process."""
    think_seconds: float = 0.0
    """Mean pause between an answer and the next turn, exponentially distributed."""

    def starts(self, seed: int) -> Iterator[float]:
        """Yields the start of each conversation of the open loop, in seconds, without an end."""
        numbers = random.Random(f"{seed}:starts")
        at = 0.0
        while True:
            yield at
            at += numbers.expovariate(self.rate)

    def pauses(self, seed: int, conversation: int) -> Iterator[float]:
        """Yields the pauses before the second and each later turn of a conversation, in seconds."""
        numbers = random.Random(f"{seed}:{conversation}:pauses")
        while True:
            yield numbers.expovariate(1 / self.think_seconds) if self.think_seconds else 0.0
