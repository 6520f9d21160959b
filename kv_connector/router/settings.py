"""RouterSettings: the router's configuration, fixed at its start."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal
from urllib.parse import urlsplit

from kv_connector.control.cluster_key import ClusterKey
from kv_connector.protocol.actions import Address
from kv_connector.router.engines.endpoint import Endpoint


class PolicyName(StrEnum):
    """The policies that choose engines, by the name of `--policy`."""

    CACHE_AWARE = "cache_aware"
    FEWEST_OUTSTANDING = "fewest_outstanding"
    GOODPUT = "goodput"


@dataclass(frozen=True)
class Objectives:
    """Objectives for each request, in seconds."""

    ttft: float
    """Seconds from a request to its first token."""
    tbt: float
    """Seconds between two tokens."""

    def __post_init__(self) -> None:
        if not (self.ttft > 0 and self.tbt > 0):
            raise ValueError("an objective must be more than 0 ms")


LONGEST_TIMEOUT = 604_800.0
"""A week, in seconds: far longer than any answer, and no number that a timer cannot hold."""


@dataclass(frozen=True)
class RequestTimeouts:
    """Time limits of each request, in seconds. None: no limit."""

    first_token: float | None = None
    """From a request's last byte to the first event of its stream."""
    idle: float | None = None
    """Between two events of a stream."""
    request: float | None = None
    """From a request's last byte to the end of its answer."""

    def __post_init__(self) -> None:
        limits = {
            "--first-token-timeout": self.first_token,
            "--idle-timeout": self.idle,
            "--request-timeout": self.request,
        }
        for option, seconds in limits.items():
            if seconds is not None and not 0 < seconds <= LONGEST_TIMEOUT:
                raise ValueError(f"{option} must be more than 0 s, and at most {LONGEST_TIMEOUT:g} s")


@dataclass(frozen=True)
class RouterSettings:
    prefill: tuple[Endpoint, ...]
    decode: tuple[Endpoint, ...]
    encoders: tuple[Endpoint, ...] = ()
    """Engines that encode the pictures of a request before its prefill engine gets it."""
    dispatch: Literal["concurrent", "serial"] = "concurrent"
    """concurrent: both engines get the request at once. serial: the decode engine gets it with the prefill
    engine's answer (NIXL's flow)."""
    body_limit: int = 64 << 20
    """Largest body of one request, in bytes. A million token ids are 7 MB of JSON; the rest is for images in
    chats."""
    body_budget: int = 128 << 20
    """Bytes of the bodies of all requests in flight. Beyond it new requests get 503. A body costs 1.5 times
    its size, and counts half once its answer has begun: 384 MiB in all, of a pod's 1 GiB."""
    requests: int = 16_351
    """Most requests in flight. The default is for 65,535 descriptors."""
    requests_per_key: int | None = None
    """Most requests in flight with one API key; None: no such limit."""
    stall: float = 60.0
    """Seconds that headers may take, a body may pause, and a reader may take nothing. It is nginx's default
    for each of the three."""
    timeouts: RequestTimeouts = RequestTimeouts()
    """Time limits of each request. A router without options has none: prompts may wait in queues."""
    stream_comments: float | None = None
    """Seconds without an event after which a stream gets a comment; None: it gets none."""
    registration: Address | None = None
    """Address where engines register; None: only the listed engines are used."""
    key: ClusterKey | None = None
    """Cluster key, which engines that register must have too."""
    suspect: float = 3.0
    dead: float = 5.0
    """Seconds without a sign of life after which a registered engine gets no new requests (suspect), and is
    lost with its requests (dead). The agents' own deadlines have the same defaults."""
    patience: float = 5.0
    """Seconds that a request waits for an engine to join. A restarted router knows all engines after one
    second. A prefill engine has the same time to finish its own answer after the decode engine's."""

    require_prefill: bool = False
    """Requests get 503 while no prefill engine takes requests. Otherwise decode engines compute the prompts
    meanwhile."""
    require_encoder: bool = False
    """Requests with pictures get 503 while no encoder engine takes requests. Otherwise prefill engines encode
    the pictures meanwhile."""
    policy: PolicyName | None = None
    """Policy that chooses engines; None: goodput with objectives, else cache_aware."""
    objectives: Objectives | None = None
    """Objectives by which requests are placed; None: a prefill engine computes every prompt."""
    prefetch_answers: bool = True
    """Whether prefill engines load the answers of conversations from decode engines before the next turn."""
    rebalance: bool = False
    """Whether running streams move from decode engines with far more streams to decode engines with far
    fewer."""
    status_details: bool = False
    """Whether the status page shows engines' addresses and error messages."""
    otlp_traces_endpoint: str | None = None
    """OTLP endpoint for spans; None: no spans."""
    access_log: str | None = None
    """File that gets one JSON line for each request, or "-" for standard output; None: no file."""

    api_key_file: str | None = None
    """File with the API keys of clients; None: the router accepts every client, and engines get its key."""
    engine_key_file: str | None = None
    """File with the key that engines expect (vLLM's --api-key); None: engines get the client's key."""
    engine_ca: str | None = None
    """PEM file of the authorities that sign certificates of engines; None: those of this host."""
    admin: Address | None = None
    """Address of metrics and status, which are not served at the clients' address then. None: they are."""
    allow_origins: tuple[str, ...] = ()
    """Origins whose scripts may read answers (CORS); "*": all."""

    def __post_init__(self) -> None:
        if self.requests_per_key is not None and self.api_key_file is None:
            raise ValueError("--requests-per-key counts requests by API key. Set --api-key-file")
        if self.stream_comments is not None and not 0 < self.stream_comments <= LONGEST_TIMEOUT:
            raise ValueError(f"--stream-comments must be more than 0 s, and at most {LONGEST_TIMEOUT:g} s")
        for origin in self.allow_origins:
            if not _is_origin(origin):
                raise ValueError(
                    f"--allow-origin {origin!r} is not an origin. Give a scheme and host, for example "
                    "https://chat.example.com, or *"
                )
        if len(set(self.prefill)) < len(self.prefill):
            raise ValueError(
                "a prefill engine is listed twice with one control address. Data-parallel ranks share the "
                "URL, but each needs its own control address (--prefill URL@HOST:PORT)"
            )
        if others := {e.url for e in self.encoders} & {e.url for e in (*self.prefill, *self.decode)}:
            raise ValueError(
                f"{min(others)} is listed as an encoder engine and as another engine. An encoder engine "
                "computes no tokens: give --encoder its own engines"
            )
        if self.require_encoder and not self.encoders:
            raise ValueError("--require-encoder needs encoder engines. Give at least one --encoder")
        if self.objectives is not None and self.registration is None:
            raise ValueError(
                "--ttft-ms and --tbt-ms need engines that register. Set --registration HOST:PORT"
            )
        if self.objectives is None and self.policy is PolicyName.GOODPUT:
            raise ValueError(
                "--policy goodput needs objectives. Set --ttft-ms and --tbt-ms, for example 400 and 15"
            )
        if self.objectives is not None and self.policy not in (None, PolicyName.GOODPUT):
            raise ValueError(
                f"--policy {self.policy} does not use --ttft-ms and --tbt-ms. Remove them, or set --policy "
                "goodput"
            )
        if not 0 < self.body_limit <= self.body_budget:
            raise ValueError("--body-budget must be at least --body-limit, and both must be more than 0")
        if self.registration is None and not (self.prefill and self.decode):
            raise ValueError(
                "the router has no engines. Give at least one --prefill and one --decode, or an address at "
                "which engines register (--registration HOST:PORT)"
            )


def _is_origin(text: str) -> bool:
    """Returns whether a browser sends this text as an origin, or it stands for all origins."""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        return False
    host = parts.hostname or ""
    if ":" in host:  # an IPv6 address
        host = f"[{host}]"
    plain = f"{parts.scheme}://{host}" if port is None else f"{parts.scheme}://{host}:{port}"
    return text == "*" or (parts.scheme in ("http", "https") and host != "" and text == plain)
