"""The parameters of a request, with which a router marks it as one half of a transfer.

A router may also propose an engine that has the prompt's leading tokens (``prefix_from``). The engine that
computes the prompt can then load their pages. The proposal is a hint: if it has no effect, the engine
computes these tokens, and the transfer goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kv_connector.protocol.actions import Address
from kv_connector.protocol.wire.messages import id_problem

# The longest contexts of models are 10 M tokens.
MAX_PREFIX_TOKENS = 1 << 24


class BadParams(ValueError):
    """A request's transfer parameters cannot be used. The request is computed locally."""


@dataclass(frozen=True)
class PrefillParams:
    """This engine computes the prompt for a D."""

    transfer_id: str | None
    """None: a router with NIXL's flow names no transfer, and D learns the name from P's response."""
    serial: bool
    """Whether the router dispatches D after P."""


@dataclass(frozen=True)
class DecodeParams:
    """The prefill engine ``peer`` computes the prompt."""

    transfer_id: str
    peer: Address
    early_token: bool = False
    """Whether the client gets the token that P samples, so that D must continue with it."""


@dataclass(frozen=True)
class PrefixFrom:
    """The engine ``lender`` is expected to have the prompt's first ``tokens`` tokens."""

    lender: Address
    tokens: int
    prefetch: int | None = None
    """Most tokens that the request loads for a later request. It computes nothing. None: it computes what it
    does not load."""


def parse_prefix(params: Mapping[str, Any]) -> PrefixFrom | None:
    """The engine from which the prompt's leading tokens may be loaded. None: the router proposes no engine.

    Raises BadParams if the proposal cannot be used. The request then has no prefix, and keeps its transfer.
    """
    proposed = params.get("prefix_from")
    if proposed is None:
        return None
    if not isinstance(proposed, Mapping):
        raise BadParams(f"prefix_from must be an object with host, port and tokens, not {proposed!r:.100}")
    if params.get("do_remote_prefill"):
        raise BadParams(
            "prefix_from is for the engine that computes the prompt, and this request loads it from its "
            "prefill engine (do_remote_prefill): send prefix_from to the prefill engine"
        )
    tokens = proposed.get("tokens")
    if isinstance(tokens, bool) or not isinstance(tokens, int) or not 0 < tokens <= MAX_PREFIX_TOKENS:
        raise BadParams(f"prefix_from.tokens must be 1 to {MAX_PREFIX_TOKENS} tokens, not {tokens!r:.100}")
    prefetch = proposed.get("prefetch")
    if prefetch is not None:
        if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 1:
            raise BadParams(f"prefix_from.prefetch must be 1 token or more, not {prefetch!r:.100}")
        if params.get("do_remote_decode"):
            raise BadParams(
                "prefix_from.prefetch is for a request that computes nothing, and this request computes a "
                "prompt for a decode engine (do_remote_decode): remove one of them"
            )
    lender = _address(proposed, "prefix_from.host", "prefix_from.port", "lending")
    return PrefixFrom(lender, tokens, prefetch)


def parse_params(params: Mapping[str, Any]) -> PrefillParams | DecodeParams | None:
    """The half of a transfer that these parameters describe. None: the request is not part of a transfer.
    Raises BadParams for all unusable values."""
    remote_decode = bool(params.get("do_remote_decode"))
    remote_prefill = bool(params.get("do_remote_prefill"))
    if remote_decode and remote_prefill:
        raise BadParams("do_remote_decode and do_remote_prefill are both set; set one of them")
    transfer_id = params.get("transfer_id")
    if remote_decode:
        named = None if transfer_id is None else _checked(transfer_id)
        return PrefillParams(named, serial=params.get("serial") is True)
    if remote_prefill:
        early = params.get("early_token") is True
        return DecodeParams(_checked(transfer_id), _peer(params), early)
    return None


def _checked(transfer_id: object) -> str:
    if not isinstance(transfer_id, str):
        raise BadParams(f"transfer_id must be a string, not {transfer_id!r:.100}")
    if problem := id_problem(transfer_id):
        raise BadParams(problem)
    return transfer_id


def _peer(params: Mapping[str, Any]) -> Address:
    return _address(params, "remote_host", "remote_port", "prefill")


def _address(fields: Mapping[str, Any], host_name: str, port_name: str, kind: str) -> Address:
    host, port = (fields.get(name.rpartition(".")[2]) for name in (host_name, port_name))
    if not isinstance(host, str) or not host:
        raise BadParams(f"{host_name} must be the {kind} engine's control_host, not {host!r:.100}")
    if isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65536:
        raise BadParams(f"{port_name} must be the {kind} engine's control_port, not {port!r:.100}")
    return Address(host, port)
