"""Settings: what a router is told when it starts."""

from dataclasses import dataclass
from typing import Literal

from kv_connector.control.cluster_key import ClusterKey
from kv_connector.protocol.actions import Address
from kv_connector.router.engines.endpoint import Endpoint


@dataclass(frozen=True)
class Objectives:
    """What requests are to be served within, in seconds."""

    ttft: float
    """From a request to its first token."""
    tbt: float
    """Between two tokens."""

    def __post_init__(self) -> None:
        if not (self.ttft > 0 and self.tbt > 0):
            raise ValueError("an objective must be more than 0 ms")


@dataclass(frozen=True)
class Settings:
    prefill: tuple[Endpoint, ...]
    decode: tuple[Endpoint, ...]
    dispatch: Literal["concurrent", "serial"] = "concurrent"
    """concurrent: P and D get the request at once. serial: D gets it with what P answered (NIXL's flow)."""
    body_limit: int = 64 << 20
    """Bytes of one request. A million token ids are 7 MB of JSON; the rest is for images in chats."""
    body_budget: int = 128 << 20
    """Bytes of the bodies of all requests in flight. Beyond it new ones get 503. A body costs 1.5 times its
    size, and counts half once its answer has begun: 384 MiB in all, of a pod's 1 GiB."""
    requests: int = 16_351
    """Most requests in flight. The default is for 65,535 descriptors."""
    stall: float = 60.0
    """Seconds that headers may take, a body may stand still, and a reader may take nothing. nginx's default
    for each of the three."""
    registration: Address | None = None
    """Where engines register; None: only those listed are used."""
    key: ClusterKey | None = None
    """Of the cluster: who registers has it too."""
    suspect: float = 3.0
    dead: float = 5.0
    """Seconds without a sign of life after which a registered engine gets nothing new, and is given up with
    the requests that it has. The agents' own deadlines have the same defaults."""
    patience: float = 5.0
    """Seconds that a request waits for an engine to join (a router that comes back knows all after one), and
    that P may take for its own answer once D has given the whole one."""

    require_prefill: bool = False
    """Requests get 503 while no prefill engine takes any. Else decode engines then compute the prompts."""
    objectives: Objectives | None = None
    """By which requests are placed; None: every prompt is computed by a prefill engine."""
    rebalance: bool = False
    """Running streams move from decode engines with far more of them to those with far fewer."""
    status_details: bool = False
    """Whether the status page names engines' addresses, and repeats what they say of their failures."""
    otlp_traces_endpoint: str | None = None
    """Where spans go; None: there are none."""

    def __post_init__(self) -> None:
        if len(set(self.prefill)) < len(self.prefill):
            raise ValueError(
                "a prefill engine is listed twice with one control address. Data-parallel ranks share the "
                "URL, but each needs its own control address (--prefill URL@HOST:PORT)"
            )
        if self.objectives is not None and self.registration is None:
            raise ValueError(
                "--ttft-ms and --tbt-ms need engines that register. Set --registration HOST:PORT"
            )
        if not 0 < self.body_limit <= self.body_budget:
            raise ValueError("--body-budget must be at least --body-limit, and both must be more than 0")
        if self.registration is None and not (self.prefill and self.decode):
            raise ValueError(
                "the router has no engines. Give at least one --prefill and one --decode, or an address at "
                "which engines register (--registration HOST:PORT)"
            )
