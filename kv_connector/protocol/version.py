"""The identity of a version of the weights: a name, which operators read, and a tag, which tells versions of
one name apart.

Trainers use names again: each run begins at "1". So engines and routers compare identities as they are, and
show the name alone.
"""

from __future__ import annotations

import hashlib
import re

# 32 bits: two versions of one name have the same tag in one of four billion cases.
_TAG_BYTES = 4
_IDENTITY = re.compile(rf"(?s)(.+)#([0-9a-f]{{{2 * _TAG_BYTES}}})")
MAX_NAME = 128 - 1 - 2 * _TAG_BYTES
"""Characters of a name, whose identity has to fit messages.Version."""


def identity(name: str, content: str) -> str:
    """The identity of a version. ``content``: different for each content that a version of the name has."""
    return f"{name}#{hashlib.blake2b(content.encode(), digest_size=_TAG_BYTES).hexdigest()}"


def shown(version: str) -> str:
    """The name of a version, for people; empty: the weights that an engine was started with."""
    found = _IDENTITY.fullmatch(version)
    return version if found is None else found[1]


def shown_apart(one: str, other: str) -> tuple[str, str]:
    """The names of two different versions; of one name, with the tags that tell them apart."""
    names = (shown(one), shown(other))
    return (one, other) if names[0] == names[1] else names
