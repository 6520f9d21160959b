"""The contents of a deployment's files: the engines and the router that they start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["prefill", "decode", "both"]

STAND_IN = "an-unknown-variable"
"""Stands for a variable that is set elsewhere. Errors that mention it are not reported."""


class Unreadable(ValueError):
    """A file without usable contents. The message contains the reason."""


@dataclass(frozen=True)
class PortScope:
    """A scope of shared ports.

    All that a file starts shares one, but each service and each pod has its own.
    """

    name: str
    container: bool = False


@dataclass(frozen=True)
class Command:
    """A command of a file."""

    where: str
    """Name for the reader: the file, and the container if there are several."""
    machine: PortScope
    words: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class ConfiguredEngine:
    where: str
    machine: PortScope
    framework: Literal["vLLM", "SGLang"] | None
    """Framework of the engine. None: bare settings, which do not show it."""
    role: Role | None
    settings: Mapping[str, Any]
    options: Mapping[str, str] | None = None
    """Options of the server by their long names. None: the file does not contain them."""
    environment: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    """Errors in the file around the settings."""

    def number(self, option: str, default: int) -> int:
        """Returns an option's number, or the default."""
        text = (self.options or {}).get(option, "")
        return int(text) if text.isdecimal() else default

    @property
    def ranks(self) -> int:
        """Ranks of one data-parallel rank."""
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
    """A part whose settings are known only on the machine that starts it."""

    where: str
    words: str


@dataclass(frozen=True)
class Router:
    where: str
    machine: PortScope
    arguments: Sequence[str]
    environment: Mapping[str, str]
    options: Mapping[str, Any] | None = None
    """Contents of its configuration file; None: the file starts the router."""
