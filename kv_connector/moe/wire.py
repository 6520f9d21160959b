"""Messages by which ranks form a group: MessagePack, decoded with types and bounds.

The caller's exchange carries HELLO, LINKS and OUTCOME from every rank to every rank. Only groups of several
nodes send LINKS. INTRODUCTION travels with a descriptor over a socket between two ranks. An admission sends
ADMISSION in place of HELLO.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeVar

import msgspec

from kv_connector.moe import settings as limits
from kv_connector.moe.fault import GroupError
from kv_connector.moe.settings import GroupSettings

# A HELLO has less than 2 KiB: a text of 1,024 characters, and numbers.
MAX_BYTES = 8 << 10
# A handshake of a link has a few KiB for each domain.
MAX_LINKS_BYTES = 1 << 20
# A HELLO, and the rank of each expert.
MAX_ADMISSION_BYTES = MAX_BYTES + limits.MAX_EXPERTS
MAX_TEXT = 1024
NAME_BYTES = 16
SECRET_BYTES = 32

_Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
_Rank = Annotated[int, msgspec.Meta(ge=0, lt=limits.MAX_RANKS)]
_Process = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
_User = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_Name = Annotated[bytes, msgspec.Meta(min_length=NAME_BYTES, max_length=NAME_BYTES)]
_Provider = Annotated[str, msgspec.Meta(max_length=64)]
_Secret = Annotated[bytes, msgspec.Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]


class Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings that all ranks have alike."""

    ranks: Annotated[int, msgspec.Meta(ge=1, le=limits.MAX_RANKS)]
    hidden: Annotated[int, msgspec.Meta(ge=1, le=limits.MAX_HIDDEN)]
    top_k: Annotated[int, msgspec.Meta(ge=1, le=limits.MAX_TOP_K)]
    experts: Annotated[int, msgspec.Meta(ge=1, le=limits.MAX_EXPERTS)]
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=limits.MAX_TOKENS)]
    row_bytes: Annotated[int, msgspec.Meta(ge=1, le=limits.MAX_ROW_BYTES)]
    slots: Annotated[int, msgspec.Meta(ge=1, le=limits.MAX_SLOTS)]
    timeout: Annotated[float, msgspec.Meta(gt=0, le=limits.MAX_TIMEOUT)]
    survive: bool
    lanes: Annotated[tuple[_Provider, ...], msgspec.Meta(max_length=limits.MAX_LANES)]
    """Providers of the lanes to other nodes."""
    memory: Annotated[str, msgspec.Meta(max_length=16)]
    """"gpu" or "host"."""

    @classmethod
    def of(cls, settings: GroupSettings) -> Facts:
        fields = {name: getattr(settings, name) for name in cls.__struct_fields__ if hasattr(settings, name)}
        fields["lanes"] = tuple(lane.provider for lane in settings.lanes)
        return cls(**fields, memory="host" if settings.device is None else "gpu")


class HelloRelease(msgspec.Struct, frozen=True):
    """The part of a HELLO that every release understands."""

    release: Annotated[str, msgspec.Meta(max_length=64)]


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="hello"):
    """The first message of a rank."""

    release: Annotated[str, msgspec.Meta(max_length=64)]
    rank: _Rank
    facts: Facts
    machine: Annotated[str, msgspec.Meta(max_length=256)]
    """Boot id, namespaces and the name of the node: processes with equal ones pass descriptors to each other.
    Others need lanes."""
    pid: _Process
    uid: _User
    name: _Name
    """Name of the socket on which this rank listens."""
    secret: _Secret
    """A process that connects to this rank proves with it that it received this message."""
    problem: _Text = ""
    """Why this rank cannot take part, or ""."""


class Membership(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The state of a group at a rank that admits another one."""

    epochs: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)], ...], msgspec.Meta(max_length=limits.MAX_SLOTS)
    ]
    """Number of dispatches in each slot, modulo 2^32."""
    masked: Annotated[tuple[_Rank, ...], msgspec.Meta(max_length=limits.MAX_RANKS)]
    """Ranks that steps go on without, in order."""
    owners: Annotated[bytes, msgspec.Meta(max_length=limits.MAX_EXPERTS)]
    """The rank of each expert. Empty: every row goes to every rank."""


class Admission(Hello, frozen=True, forbid_unknown_fields=True, tag="admission", kw_only=True):
    """The first message of a rank in an admission."""

    admits: _Rank
    """The rank to admit, which may be the sender."""
    member: Membership | None = None
    """None: the sender is the new process."""


class Links(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="links"):
    """A step of connecting ranks of different nodes."""

    to: dict[_Rank, bytes]
    """The bytes for each rank of another node."""


class FormingOutcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="outcome"):
    """The last message of a rank."""

    problem: _Text = ""
    """Why this rank has no group, or ""."""


class Introduction(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="introduction"):
    """Sent to another rank, with the descriptor of the sender's segment and pidfds of its sentinels."""

    rank: _Rank
    secret: _Secret
    """From the receiver's HELLO."""


_M = TypeVar("_M", bound=msgspec.Struct)
_H = TypeVar("_H", bound=Hello)


def encode(message: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(message)


def decode(data: bytes, kind: type[_M], most: int = MAX_BYTES) -> _M:
    """Raises ValueError, whatever the bytes are."""
    if len(data) > most:
        raise ValueError(f"a message of {len(data)} bytes, at most {most} are valid")
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"a malformed message: {error}") from None


def bounded(text: str) -> str:
    """Cuts an error text to the length that a message holds."""
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 3] + "..."


def read_hellos(messages: Sequence[bytes], ranks: int) -> list[Hello]:
    """The HELLO of every rank. Raises GroupError where the ranks cannot form a group.

    The error depends on the messages alone, so all ranks raise the same.
    """
    return _read_hellos(messages, ranks, Hello, MAX_BYTES)


def read_admissions(messages: Sequence[bytes], ranks: int) -> tuple[list[Admission], Membership]:
    """The ADMISSION of every rank, and the state that all members of the group have alike.

    Raises GroupError where the rank cannot be admitted, alike on all ranks.
    """
    hellos = _read_hellos(messages, ranks, Admission, MAX_ADMISSION_BYTES)
    admits = hellos[0].admits
    if not hellos[0].facts.survive:
        raise GroupError("the group does not survive the end of a rank. Set survive=True on all ranks.")
    members = []
    for rank, hello in enumerate(hellos):
        if hello.admits != admits:
            raise GroupError(f"rank {rank} takes part in the admission of rank {hello.admits}, not {admits}")
        if (hello.member is None) != (rank == admits):
            raise GroupError(f"only rank {admits} may be a new process, and rank {rank} is not as expected")
        if hello.member is not None:
            members.append((rank, hello.member))
    first_rank, first = members[0]
    for rank, member in members:
        if admits not in member.masked:
            raise GroupError(
                f"rank {rank} has not gone on without rank {admits}. "
                "End the old process, and run a step on all other ranks."
            )
        if other := [one for one in member.masked if one != admits]:
            raise GroupError(
                f"rank {rank} goes on without rank {other[0]}, too. "
                "A group admits a rank only if no other one is missing."
            )
        if member.epochs != first.epochs:
            raise GroupError(
                f"rank {rank} has run another number of dispatches than rank {first_rank}. "
                "Call admit() after the same step on all ranks."
            )
        if member.owners != first.owners:
            raise GroupError(
                f"rank {rank} has another placement of experts than rank {first_rank}. "
                "Call place() alike on all ranks."
            )
    return hellos, first


def _read_hellos(messages: Sequence[bytes], ranks: int, kind: type[_H], most: int) -> list[_H]:
    if len(messages) != ranks:
        raise GroupError(f"{len(messages)} ranks exchange messages, the setting ranks is {ranks}")
    releases = [_decode(message, HelloRelease, rank, most).release for rank, message in enumerate(messages)]
    for rank, release in enumerate(releases):
        if release != releases[0]:
            raise GroupError(
                f"rank {rank} has kv-connector {release}, rank 0 has {releases[0]}. "
                "Install the same release for all ranks."
            )
    hellos = [_decode(message, kind, rank, most) for rank, message in enumerate(messages)]
    problems = [(rank, hello.problem) for rank, hello in enumerate(hellos)]
    first = hellos[0]
    for rank, hello in enumerate(hellos):
        if hello.rank != rank:
            raise GroupError(f"place {rank} of the exchange has the message of rank {hello.rank}")
        for field in Facts.__struct_fields__:
            value, expected = getattr(hello.facts, field), getattr(first.facts, field)
            if value != expected:
                raise GroupError(
                    f"rank {rank} has {field}={value}, rank 0 has {field}={expected}. "
                    "Set the same value on all ranks."
                )
    raise_problems(problems)
    firsts: dict[str, _H] = {}
    for rank, hello in enumerate(hellos):
        if hello.machine != first.machine and not first.facts.lanes:
            raise GroupError(
                f"rank {rank} is on another machine than rank 0, or in other network or process namespaces. "
                "A group of several machines needs lanes."
            )
        of_node = firsts.setdefault(hello.machine, hello)
        if hello.uid != of_node.uid:
            raise GroupError(
                f"rank {rank} runs as user {hello.uid}, rank {of_node.rank} as user {of_node.uid}"
            )
    return hellos


def read_links(messages: Sequence[bytes], ranks: int, rank: int) -> dict[int, bytes]:
    """The bytes that each rank sent to ``rank``. Raises GroupError."""
    if len(messages) != ranks:
        raise GroupError(f"{len(messages)} ranks exchange messages, the setting ranks is {ranks}")
    links = [_decode(message, Links, other, MAX_LINKS_BYTES) for other, message in enumerate(messages)]
    return {other: one.to[rank] for other, one in enumerate(links) if rank in one.to}


def read_outcomes(messages: Sequence[bytes], ranks: int) -> None:
    """Raises GroupError with the problems of all ranks, if a rank has one."""
    if len(messages) != ranks:
        raise GroupError(f"{len(messages)} ranks exchange messages, the setting ranks is {ranks}")
    raise_problems([(rank, _decode(one, FormingOutcome, rank).problem) for rank, one in enumerate(messages)])


def raise_problems(problems: Sequence[tuple[int, str]]) -> None:
    if found := [f"rank {rank}: {problem}" for rank, problem in problems if problem]:
        raise GroupError("; ".join(found))


def _decode(message: bytes, kind: type[_M], rank: int, most: int = MAX_BYTES) -> _M:
    try:
        return decode(message, kind, most)
    except ValueError as error:
        raise GroupError(f"rank {rank} sent {error}") from None
