"""What a deployment's files say: the engines and the router that somebody will start from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["prefill", "decode", "both"]

STAND_IN = "an-unknown-variable"
"""In the place of a variable that is set elsewhere. Whether something is wrong with it, nobody here knows."""


class Unreadable(ValueError):
    """A file of which nothing can be said; the message says why."""


@dataclass(frozen=True)
class Machine:
    """Where ports are shared: by all that a file starts, but a service or a pod has its own."""

    name: str
    container: bool = False


@dataclass(frozen=True)
class Command:
    """A command as somebody wrote it."""

    where: str
    """For the reader: the file, and of several containers which."""
    machine: Machine
    words: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Engine:
    where: str
    machine: Machine
    framework: Literal["vLLM", "SGLang"] | None
    """None: bare settings, of which nobody says whose they are."""
    role: Role | None
    settings: Mapping[str, Any]
    options: Mapping[str, str] | None = None
    """The server's, by their long names; None: the file does not have them."""
    environment: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    """What was wrong with the file around the settings."""

    def number(self, option: str, default: int) -> int:
        """A number among the options."""
        text = (self.options or {}).get(option, "")
        return int(text) if text.isdecimal() else default

    @property
    def ranks(self) -> int:
        """Of one data-parallel rank."""
        return self.number("tensor-parallel-size", 1) * self.number("pipeline-parallel-size", 1)

    @property
    def data_parallel(self) -> int:
        return self.number("data-parallel-size", 1)

    @property
    def api_port(self) -> int | None:
        if self.options is None or self.framework is None or "$" in self.options.get("port", ""):
            return None
        return self.number("port", {"vLLM": 8000, "SGLang": 30000}[self.framework])


@dataclass(frozen=True)
class Unknown:
    """What is only known where an engine or a router is started."""

    where: str
    words: str


@dataclass(frozen=True)
class Router:
    where: str
    machine: Machine
    arguments: Sequence[str]
    environment: Mapping[str, str]
