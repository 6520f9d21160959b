"""Requests of other projects' routers are read like those of this project's router.

The bodies are those that the projects' sources build. Each has a note of its source. tests/fleet sends them
to real engines.
"""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kv_connector.protocol.actions import Address
from kv_connector.protocol.params import BadParams, DecodeParams, PrefillParams, parse_params
from kv_connector.protocol.wire.messages import id_problem
from kv_connector.vllm.dialects import in_our_words

P = Address("10.0.0.1", 5600)
FRESH = "3f1c6d2a9b8e4f70a1b2c3d4e5f60718"

# The fields of NIXL's flow for P, from any of its senders: vLLM's own proxies, vllm-router's nixl mode,
# llm-d's sidecar, production-stack's orchestrated mode, AIBrix, Dynamo.
OF_NIXL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
}
# The answer of P, which all of them pass to D. AIBrix and production-stack put P's own host into it.
ANSWER_OF_P = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "transfer_id": "t",
    "remote_engine_id": "engine",
    "remote_host": P.host,
    "remote_port": P.port,
}
MORIIO_ID = (
    "___prefill_addr_host:10.0.0.1,handshake:5600,notify:5600"
    f"___decode_addr_host:10.0.0.2,handshake:5700,notify:5700_{FRESH}"
)


@pytest.mark.parametrize(
    ("request_id", "params", "expected"),
    [
        # vllm-project/vllm 030ea52effcb05071543c8c42b8f0145e94cee43,
        # tests/v1/kv_connector/nixl_integration/toy_proxy_server.py
        pytest.param("r", OF_NIXL, PrefillParams(None, serial=False), id="NIXL to P"),
        pytest.param("r", ANSWER_OF_P, DecodeParams("t", P), id="NIXL to D"),
        # llm-d/llm-d-router 0545789098a63157c372443db4145d91895977b4, pkg/sidecar/proxy/connector_nixlv2.go
        pytest.param(
            "r",
            {
                **OF_NIXL,
                "remote_host": "10.0.0.2",
                "remote_notify_port": 61005,
                "remote_dp_rank": 0,
                "remote_dp_rank_override": True,
                "remote_handshake_port": 6301,
                "transfer_id": "tx7",
                "tp_size": 1,
                "remote_dp_size": 1,
            },
            PrefillParams("tx7", serial=False),
            id="llm-d moriio to P",
        ),
        pytest.param(
            "r",
            {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": "10.0.0.1:5600",
                "remote_block_ids": [],
                "remote_host": "10.0.0.1",
                "remote_port": 5600,
                "remote_notify_port": 61005,
                "remote_dp_rank": 0,
                "remote_dp_rank_override": True,
                "remote_handshake_port": 5600,
                "transfer_id": "tx7",
                "tp_size": 1,
                "remote_dp_size": 1,
                "remote_hosts": ["10.0.0.1"],
            },
            DecodeParams("tx7", P),
            id="llm-d moriio to D",
        ),
        # From the same commit, connector_p2p.go
        pytest.param(
            "r",
            {"remote_decoder": {"kv_request_id": "k"}},
            PrefillParams("k", serial=False),
            id="llm-d offloading to P",
        ),
        pytest.param(
            "r",
            {"remote_prefiller": {"kv_request_id": "k", "remote_host": "10.0.0.1", "remote_port": 5600}},
            DecodeParams("k", P),
            id="llm-d offloading to D",
        ),
        pytest.param(
            "r",
            {"remote_kv_source": {"kv_request_id": "k", "remote_host": "10.0.0.1", "remote_port": 5600}},
            None,
            id="llm-d: a cached prefix elsewhere",
        ),
        # From the wheel vllm-router 0.1.17, recorded by a server
        pytest.param(
            f"cmpl-{MORIIO_ID}-0-1a2b3c4d",
            {
                "do_remote_decode": True,
                "do_remote_prefill": False,
                "remote_engine_id": None,
                "remote_block_ids": None,
                "transfer_id": "tx-1",
                "remote_dp_size": 1,
                "remote_tp_size": 1,
            },
            PrefillParams("tx-1", serial=False),
            id="vllm-router moriio to P",
        ),
        pytest.param(
            f"cmpl-{MORIIO_ID}-0-1a2b3c4d",
            {
                "do_remote_decode": False,
                "do_remote_prefill": True,
                "remote_engine_id": None,
                "remote_block_ids": None,
                "transfer_id": "tx-1",
                "remote_dp_size": 1,
                "remote_tp_size": 1,
            },
            DecodeParams("tx-1", P),
            id="vllm-router moriio to D",
        ),
        pytest.param(
            f"chatcmpl-{MORIIO_ID.replace('10.0.0.1', 'fd00::1')}-1a2b3c4d",
            {"do_remote_prefill": True, "transfer_id": "tx-1"},
            DecodeParams("tx-1", Address("fd00::1", 5600)),
            id="vllm-router moriio to D over IPv6",
        ),
        pytest.param(f"cmpl-{MORIIO_ID}-0", {}, None, id="an address and no transfer"),
    ],
)
def test_a_body(
    request_id: str, params: dict[str, Any], expected: PrefillParams | DecodeParams | None
) -> None:
    assert parse_params(in_our_words(params, request_id)) == expected


def test_address_in_the_params_takes_precedence_over_the_address_in_the_id() -> None:
    params = {"do_remote_prefill": True, "transfer_id": "t", "remote_host": "10.0.0.9", "remote_port": 7}
    assert parse_params(in_our_words(params, MORIIO_ID)) == DecodeParams("t", Address("10.0.0.9", 7))


@pytest.mark.parametrize(
    ("request_id", "params", "problem"),
    [
        ("r", {"do_remote_prefill": True, "transfer_id": "t"}, "remote_host must be"),
        (
            MORIIO_ID.replace("5600", "99999"),
            {"do_remote_prefill": True, "transfer_id": "t"},
            "remote_port must be",
        ),
        (MORIIO_ID, {"do_remote_prefill": True}, "transfer_id must be a string, not None"),
        ("r", {"remote_prefiller": {"kv_request_id": "k"}}, "remote_host must be"),
    ],
)
def test_missing_parameter_is_named(request_id: str, params: dict[str, Any], problem: str) -> None:
    with pytest.raises(BadParams, match=problem):
        parse_params(in_our_words(params, request_id))


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=5,
)
words = ("do_remote_decode", "do_remote_prefill", "transfer_id", "remote_host", "remote_port")
foreign = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("kv_request_id", "remote_host", "remote_port"), anything)
)
whatever = st.dictionaries(st.sampled_from([*words, "remote_kv_source"]), anything).flatmap(
    lambda params: st.fixed_dictionaries(
        {name: st.just(value) for name, value in params.items()},
        optional={"remote_decoder": foreign | anything, "remote_prefiller": foreign | anything},
    )
)
ids = st.text() | st.builds(
    "cmpl-___prefill_addr_host:{},handshake:{},notify:1___decode_addr_{}".format,
    st.text(),
    st.integers() | st.text(),
    st.text(),
)


@given(whatever, ids)
def test_client_params_in_any_dialect_are_refused_or_usable(params: dict[str, Any], request_id: str) -> None:
    before = repr(params)
    try:
        parsed = parse_params(in_our_words(params, request_id))
    except BadParams:
        parsed = None
    assert repr(params) == before
    if isinstance(parsed, DecodeParams):
        assert parsed.peer.host
        assert 0 < parsed.peer.port < 65536
    if parsed is not None and parsed.transfer_id is not None:
        assert id_problem(parsed.transfer_id) is None


@given(st.dictionaries(st.sampled_from(words), anything), ids)
@example({**ANSWER_OF_P}, MORIIO_ID)
def test_params_of_this_projects_router_stay_unchanged(params: dict[str, Any], request_id: str) -> None:
    """This project's router always names P's address: no request's id can lead D to another address."""
    said = {**params, "remote_host": params.get("remote_host") or "10.0.0.1"}
    assert in_our_words(said, request_id) is said
