"""Dialects: translates other projects' request fields into those of ``protocol.params``.

Two routers of other projects send the request to P and D at once. They name the transfer or P's address in
other fields:

- llm-d's sidecar in its mode for OffloadingConnector: ``remote_decoder`` for P, ``remote_prefiller`` for D;
- vllm-router in its moriio mode: D finds P's address, as P has announced it (control/moriio_announcer.py), in
  the request's id alone.

All other routers use this project's fields, too. Their additional fields are for other connectors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# vLLM puts the operation before the router's id, and a number and a few digits behind it.
_ADDRESS_OF_P = re.compile(r"___prefill_addr_host:([^,]{1,255}),handshake:([0-9]{1,5}),notify:")


def in_our_words(params: Mapping[str, Any], request_id: str) -> Mapping[str, Any]:
    """Returns a request's ``kv_transfer_params``, with other routers' fields translated and added.

    A pure function that accepts whatever clients send. It leaves unusable fields to ``parse_params``, which
    names them in its error.
    """
    if params.get("do_remote_prefill") and not params.get("remote_host"):
        if address := _ADDRESS_OF_P.search(request_id):
            return {**params, "remote_host": address[1], "remote_port": int(address[2])}
        return params
    if isinstance(decoder := params.get("remote_decoder"), Mapping):
        return {**params, "do_remote_decode": True, "transfer_id": decoder.get("kv_request_id")}
    if isinstance(prefiller := params.get("remote_prefiller"), Mapping):
        return {
            **params,
            "do_remote_prefill": True,
            "transfer_id": prefiller.get("kv_request_id"),
            "remote_host": prefiller.get("remote_host"),
            "remote_port": prefiller.get("remote_port"),
        }
    return params
