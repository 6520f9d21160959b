"""ClusterKey: the secret that the engines and routers of a cluster share, and its file.

It is a CURVE key pair. Both ends of every control connection use the same pair. So the connecting side proves
that it has the secret, and so does the accepting side.
"""

from __future__ import annotations

import binascii
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import zmq
from zmq.utils import z85

# Names the key file if no setting does.
KEY_FILE_VARIABLE = "KV_CONNECTOR_KEY_FILE"

_SECRET_BYTES = 32
# More than a key and its line end. A larger file that was named by mistake is not read into memory.
_LONGEST_FILE = 256
# A group may read the file, because Kubernetes mounts a secret that way for a pod that is not root.
_FORBIDDEN_MODE = stat.S_IWGRP | stat.S_IRWXO


class KeyFileError(ValueError):
    """The file holds no usable key. The message says what to do."""


@dataclass(frozen=True)
class ClusterKey:
    """A CURVE key pair, in Z85 as ZMQ takes it. The public half is not shown either."""

    public: bytes = field(repr=False)
    secret: bytes = field(repr=False)

    @classmethod
    def generate(cls) -> Self:
        """A new random key."""
        public, secret = zmq.curve_keypair()
        return cls(public, secret)

    @classmethod
    def read(cls, path: Path) -> Self:
        """The key in a file that ``write`` made. Raises KeyFileError."""
        # The copy first: a key that is made anew on the second host connects to nothing.
        advice = f"Copy the cluster's key there. Make the first one with: kv-connector keygen {path}"
        text = read_private(path, _LONGEST_FILE, advice)
        try:
            secret = binascii.unhexlify(text.strip())
        except ValueError:
            secret = b""
        if len(secret) != _SECRET_BYTES:
            raise KeyFileError(f"the key file {path} does not hold {2 * _SECRET_BYTES} hex digits. {advice}")
        encoded = z85.encode(secret)
        return cls(zmq.curve_public(encoded), encoded)

    def write(self, path: Path) -> None:
        """Creates a file that only its owner can read. Raises FileExistsError instead of replacing a key."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(z85.decode(self.secret).hex() + "\n")


def read_private(path: Path, longest: int, advice: str) -> bytes:
    """The contents of a file that others cannot read. Raises KeyFileError, with ``advice`` if it is missing.

    ``longest``: most bytes of the file.
    """
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read(longest + 1)
    except FileNotFoundError:
        raise KeyFileError(f"there is no key file {path}. {advice}") from None
    except OSError as error:
        raise KeyFileError(f"cannot read the key file {path}: {error.strerror}") from None
    if mode & _FORBIDDEN_MODE:
        raise KeyFileError(
            f"the key file {path} has mode {mode:04o}, which is open to others. Run: chmod 600 {path}"
        )
    if len(text) > longest:
        raise KeyFileError(f"the key file {path} is longer than {longest} bytes. {advice}")
    return text


def find_key(path: str | None) -> ClusterKey | None:
    """The key in the file that a setting names, or else in the file that the environment names, or None."""
    name = path or os.environ.get(KEY_FILE_VARIABLE)
    return ClusterKey.read(Path(name)) if name else None
