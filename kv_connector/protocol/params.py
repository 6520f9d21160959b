"""The parameters of a request, with which a router marks it as one half of a transfer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kv_connector.protocol.actions import Address
from kv_connector.protocol.messages import id_problem


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
    host, port = params.get("remote_host"), params.get("remote_port")
    if not isinstance(host, str) or not host:
        raise BadParams(f"remote_host must be the prefill engine's control_host, not {host!r:.100}")
    if isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65536:
        raise BadParams(f"remote_port must be the prefill engine's control_port, not {port!r:.100}")
    return Address(host, port)
