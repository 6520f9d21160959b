"""The identity of the checkpoint that an engine was started from, as two engines and routers compare it.

Fingerprints contain it as one more pair. The pair is missing if the identity is unknown, and once an engine
has taken other weights, which have a version. An unknown identity fits each other one.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec

from kv_connector.protocol.wire.messages import Fingerprint, Pair

_NAME = "weights"


class Checkpoint(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The identity of a checkpoint, which depends neither on its place nor on its division into files."""

    storage: Annotated[str, msgspec.Meta(max_length=256)]
    """Element types other than floating-point ones of 16 bits and more. Empty: the weights are not
    quantised."""
    digest: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    """Digest of the tensors' names, types, shapes and sampled bytes."""

    def differs(self, other: Checkpoint) -> bool:
        """Whether these are the weights of two models. A quantised checkpoint and its origin have no bytes in
        common, so they are not compared."""
        return self.storage == other.storage and self.digest != other.digest


class Weights(NamedTuple):
    """The weights that an engine serves, as routers compare them.

    ``fits`` is no equivalence: an unknown checkpoint fits two that differ. So compare each pair of engines.
    """

    version: str = ""
    """Weight version, as in messages.Version."""
    checkpoint: Checkpoint | None = None
    """The checkpoint whose weights these are. None: unknown, or later weights."""

    def fits(self, other: Weights) -> bool:
        """Whether an engine of these weights may use pages that ``other`` has computed."""
        if self.version != other.version:
            return False
        one, another = self.checkpoint, other.checkpoint
        return one is None or another is None or not one.differs(another)


UNREPORTED = Weights()
"""The weights of an engine that reports neither a version nor a checkpoint."""


def with_checkpoint(fingerprint: Fingerprint, checkpoint: Checkpoint | None) -> Fingerprint:
    """The fingerprint with the checkpoint's identity, if it is known."""
    if checkpoint is None:
        return fingerprint
    return (*fingerprint, Pair(_NAME, (checkpoint.storage, checkpoint.digest)))


def without_checkpoint(fingerprint: Fingerprint) -> tuple[Fingerprint, Checkpoint | None]:
    """A peer's fingerprint in its two parts: the pairs that both sides need, and the checkpoint's identity.

    A pair in the form of a later release is an unknown identity.
    """
    rest = tuple(pair for pair in fingerprint if pair.name != _NAME)
    for pair in fingerprint:
        if pair.name == _NAME and isinstance(pair.value, tuple) and len(pair.value) == 2:
            return rest, Checkpoint(*pair.value)
    return rest, None


def checkpoint_mismatch(prefill: Checkpoint | None, decode: Checkpoint | None) -> str | None:
    """The difference and the remedy, or None if the two engines may share pages."""
    if prefill is None or decode is None or not prefill.differs(decode):
        return None
    return (
        f"{_NAME}: prefill engine has checkpoint {prefill.digest}, decode engine has checkpoint "
        f"{decode.digest}: start both engines from the same checkpoint, or set compare_checkpoints to false "
        "on one of them"
    )
