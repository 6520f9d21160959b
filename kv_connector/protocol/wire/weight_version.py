"""The identity of a version of the weights: a name, which operators read, and a tag. Versions with the same
name differ in their tags.

Trainers reuse names: each run begins at "1". So engines and routers compare identities, and show the name
alone.
"""

from __future__ import annotations

import hashlib
import re

# 32 bits: two versions of one name have the same tag in one of four billion cases.
_TAG_BYTES = 4
_IDENTITY = re.compile(rf"(?s)(.+)#([0-9a-f]{{{2 * _TAG_BYTES}}})")
MAX_NAME = 128 - 1 - 2 * _TAG_BYTES
"""Characters of a name whose identity fits into messages.Version."""


def identity(name: str, content: str) -> str:
    """The identity of a version. ``content``: a text that differs for each content that a version of this
    name has."""
    return f"{name}#{hashlib.blake2b(content.encode(), digest_size=_TAG_BYTES).hexdigest()}"


def shown(version: str) -> str:
    """The name of a version, for operators. Empty: the weights that an engine was started with."""
    found = _IDENTITY.fullmatch(version)
    return version if found is None else found[1]


def shown_apart(one: str, other: str) -> tuple[str, str]:
    """The names of two different versions. If the names are equal, with the tags by which they differ."""
    names = (shown(one), shown(other))
    return (one, other) if names[0] == names[1] else names
