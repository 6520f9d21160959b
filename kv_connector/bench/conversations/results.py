"""The results of a run, each of which is one JSON line."""

import msgspec


class Turn(msgspec.Struct, tag="turn", kw_only=True, frozen=True):
    """One turn of a conversation, or one line of a trace."""

    conversation: int
    turn: int
    """1 for the first turn."""
    endpoint: str
    sent_s: float
    """Time of the request, in seconds after the run began."""
    late_s: float
    """Delay of the request behind its due time, in seconds. High values: the client machine is too slow."""
    cause: str = ""
    """Short name of a failure; empty: the answer is complete."""
    reason: str = ""
    """Message of a failure."""
    ttft_ms: float = 0.0
    gaps_ms: list[float] = []
    """Times between events with tokens."""
    prompt_tokens: int = 0
    new_tokens: int = 0
    """Prompt tokens that are not in the prompt of the turn before."""
    unseen_tokens: int = 0
    """New tokens without the answer of the turn before: no engine has them."""
    cached_tokens: int | None = None
    """Cached prompt tokens by the answer's usage; None: the answer has no such number."""
    answer_tokens: int = 0
    difference: str = ""
    """First difference to the answer of --compare; empty: equal, or not compared."""

    @property
    def failed(self) -> bool:
        return bool(self.cause)


class EngineGrowth(msgspec.Struct, tag="engine", kw_only=True, frozen=True):
    """The growth of one engine's counters during a run. None: the engine does not have the counter."""

    name: str
    side: str
    """The name without the number at its end."""
    requests: int | None = None
    prompt_tokens: int | None = None
    computed_tokens: int | None = None
    """Prompt tokens that the engine computed."""
    local_hit_tokens: int | None = None
    """Prompt tokens from the engine's own prefix cache."""
    transferred_tokens: int | None = None
    """Prompt tokens from other engines, by a KV connector."""
    answer_tokens: int | None = None
    bytes_pushed: int | None = None
    """KV bytes that kv-connector's agents pushed to other engines."""
    problem: str = ""
    """Reason for missing numbers."""


class Prediction(msgspec.Struct, tag="prediction", kw_only=True, frozen=True):
    """The growth of one of a router's counters of predicted or actual hits."""

    endpoint: str
    name: str
    labels: dict[str, str]
    tokens: float


class Totals(msgspec.Struct, tag="totals", kw_only=True, frozen=True):
    """The whole run; the last JSON line."""

    seconds: float
    interrupted: bool
    conversations: int
    """Conversations with at least one complete turn."""
    turns: int
    """Complete turns."""
    failures: dict[str, int]
    """Failed turns by cause."""
    differences: int
    """Turns whose answer differs from that of --compare."""
    prompt_tokens: int
    new_tokens: int
    unseen_tokens: int
    cached_tokens: int | None
    answer_tokens: int
    computed_tokens: int | None
    """Prompt tokens that all engines computed."""
    bytes_pushed: int | None
    spread: dict[str, float]
    """{side: prompt tokens of its busiest engine / those of its least busy engine}, computed or received."""
    max_late_s: float
