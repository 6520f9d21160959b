"""Endpoint: the addresses at which an engine listens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

# The connector's own default for `control_port`.
CONTROL_PORT = 5600
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}

# With this header, vLLM's API server gives a request to the core of that rank, else to whichever is free.
RANK_HEADER = "x-data-parallel-rank"


@dataclass(frozen=True)
class Endpoint:
    """An engine: its HTTP address and, for a prefill engine, the control address of its connector.

    The engines of a data-parallel deployment share the API server at `url`, which distinguishes them by rank.
    """

    url: str
    control_host: str
    control_port: int
    rank: int = 0

    def __str__(self) -> str:
        return f"{self.url} rank {self.rank}" if self.rank else self.url

    @property
    def place(self) -> tuple[str, int]:
        """Key of the engine that stays the same when another process takes its place."""
        return self.url, self.rank

    def headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Returns the headers of a request for this engine, and for no other engine behind the same API
        server."""
        return {**headers, RANK_HEADER: str(self.rank)}

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads `http://host:port` or `http://host:port@control_host:control_port`.

        Without a control address, it is the URL's host and the connector's default port. The ValueError says
        what is wrong.
        """
        url, at, control = text.strip().rpartition("@")
        if not at:
            url, control = control, ""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{text!r}: the engine's address must look like http://host:port")
        if parts.path.strip("/") or parts.query or parts.fragment:
            raise ValueError(f"{text!r}: give the engine's address without a path")
        if at and not control:
            raise ValueError(f"{text!r}: a control address host:port must follow the @")
        host, port = _host_port(control, text) if control else (parts.hostname, CONTROL_PORT)
        # Names differ in case and in the default port alone, and are one engine's.
        server = parts.netloc.lower().removesuffix(_DEFAULT_PORTS[parts.scheme])
        return cls(url=f"{parts.scheme}://{server}", control_host=host, control_port=port)


def _host_port(control: str, text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{control}")
    try:
        port = parts.port
    except ValueError:
        port = None
    if not parts.hostname or not port:
        raise ValueError(f"{text!r}: {control!r} must be host:port with a port from 1 to 65535")
    return parts.hostname, port
