"""The parameters that mark a request as one half of a transfer."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_connector.protocol.actions import Address
from kv_connector.protocol.params import (
    MAX_PREFIX_TOKENS,
    BadParams,
    DecodeParams,
    PrefillParams,
    PrefixFrom,
    parse_params,
    parse_prefix,
)
from kv_connector.protocol.wire.messages import id_problem

OF_P = {"do_remote_decode": True, "transfer_id": "t"}
OF_D = {"do_remote_prefill": True, "transfer_id": "t", "remote_host": "10.0.0.1", "remote_port": 5600}
# The parameters of NIXL's proxy.
NO_REMOTE = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))


@pytest.mark.parametrize("params", [{}, {"do_remote_decode": False, "do_remote_prefill": None}, NO_REMOTE])
def test_a_request_may_be_no_half_of_anything(params: dict[str, Any]) -> None:
    assert parse_params(params) is None


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (OF_P, PrefillParams("t", serial=False)),
        ({**OF_P, "serial": True}, PrefillParams("t", serial=True)),
        ({**OF_P, "serial": "yes"}, PrefillParams("t", serial=False)),
        (
            {"do_remote_decode": True, "do_remote_prefill": False, **NO_REMOTE},
            PrefillParams(None, False),
        ),
    ],
    ids=["concurrent", "serial", "serial is no truth value", "unnamed"],
)
def test_prefill_params_may_lack_a_name(params: dict[str, Any], expected: PrefillParams) -> None:
    assert parse_params(params) == expected


def test_decode_params_name_the_prefill_address() -> None:
    expected = DecodeParams("t", Address("10.0.0.1", 5600))
    assert parse_params(OF_D) == expected
    assert parse_params({**OF_D, "do_remote_decode": False, "remote_engine_id": "e"}) == expected


@pytest.mark.parametrize(
    ("params", "problem"),
    [
        ({**OF_P, "transfer_id": 7}, "transfer_id must be a string, not 7"),
        ({**OF_P, "transfer_id": ""}, "1 to 256 characters"),
        ({**OF_D, "transfer_id": None}, "transfer_id must be a string, not None"),
        ({**OF_D, "transfer_id": 7}, "transfer_id must be a string"),
        ({**OF_D, "transfer_id": "x" * 300}, "1 to 256 characters"),
        ({**OF_D, "transfer_id": "\ud800"}, "valid Unicode"),
        ({**OF_D, "remote_host": None}, "remote_host must be"),
        ({**OF_D, "remote_host": ""}, "remote_host must be"),
        ({**OF_D, "remote_port": "5600"}, "remote_port must be"),
        ({**OF_D, "remote_port": 70000}, "remote_port must be"),
        ({**OF_D, "remote_port": True}, "remote_port must be"),
        ({**OF_D, "do_remote_decode": True}, "both set"),
    ],
)
def test_unusable_parameters_are_named(params: dict[str, Any], problem: str) -> None:
    with pytest.raises(BadParams, match=problem):
        parse_params(params)


PREFIX = {"host": "10.0.0.2", "port": 5700, "tokens": 4096}


@pytest.mark.parametrize("half", [{}, OF_P], ids=["alone", "for a decode engine"])
def test_parse_prefix_returns_the_lender_beside_either_half(half: dict[str, Any]) -> None:
    params = {**half, "prefix_from": PREFIX}
    assert parse_prefix(params) == PrefixFrom(Address("10.0.0.2", 5700), 4096)
    assert parse_params(params) == parse_params(half)


def test_parse_prefix_returns_how_much_a_prefetch_loads() -> None:
    params = {"prefix_from": {**PREFIX, "prefetch": 600}}
    assert parse_prefix(params) == PrefixFrom(Address("10.0.0.2", 5700), 4096, 600)


@pytest.mark.parametrize("params", [{}, OF_P, OF_D, {"prefix_from": None}, {**OF_D, "prefix_from": None}])
def test_parse_prefix_returns_none_without_a_proposal(params: dict[str, Any]) -> None:
    assert parse_prefix(params) is None


@pytest.mark.parametrize(
    ("params", "problem"),
    [
        ({"prefix_from": "10.0.0.2:5700"}, "must be an object with host, port and tokens"),
        (
            {"prefix_from": {**PREFIX, "host": ""}},
            "prefix_from.host must be the lending engine's control_host",
        ),
        ({"prefix_from": {**PREFIX, "host": 7}}, "prefix_from.host must be"),
        (
            {"prefix_from": {**PREFIX, "port": 0}},
            "prefix_from.port must be the lending engine's control_port",
        ),
        ({"prefix_from": {**PREFIX, "port": True}}, "prefix_from.port must be"),
        (
            {"prefix_from": {"host": "x", "port": 1}},
            "prefix_from.tokens must be 1 to 16777216 tokens, not None",
        ),
        ({"prefix_from": {**PREFIX, "tokens": 0}}, "prefix_from.tokens must be"),
        ({"prefix_from": {**PREFIX, "tokens": True}}, "prefix_from.tokens must be"),
        ({"prefix_from": {**PREFIX, "tokens": 4096.0}}, "prefix_from.tokens must be"),
        ({"prefix_from": {**PREFIX, "tokens": MAX_PREFIX_TOKENS + 1}}, "prefix_from.tokens must be"),
        ({"prefix_from": {**PREFIX, "prefetch": 0}}, "prefix_from.prefetch must be 1 token or more, not 0"),
        ({"prefix_from": {**PREFIX, "prefetch": True}}, "prefix_from.prefetch must be"),
        ({"prefix_from": {**PREFIX, "prefetch": "all"}}, "prefix_from.prefetch must be"),
        ({**OF_P, "prefix_from": {**PREFIX, "prefetch": 600}}, "computes nothing"),
        ({**OF_D, "prefix_from": PREFIX}, "send prefix_from to the prefill engine"),
    ],
)
def test_parse_prefix_names_the_field_that_cannot_be_used(params: dict[str, Any], problem: str) -> None:
    with pytest.raises(BadParams, match=problem):
        parse_prefix(params)


anything = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.integers(), max_size=2)
)


@given(st.dictionaries(st.sampled_from(sorted({*OF_P, *OF_D, "serial"})), anything))
def test_client_params_are_refused_or_usable(params: dict[str, Any]) -> None:
    try:
        parsed = parse_params(params)
    except BadParams:
        return
    if isinstance(parsed, DecodeParams):
        assert parsed.peer.host
        assert 0 < parsed.peer.port < 65536
    if parsed is not None and parsed.transfer_id is not None:
        assert id_problem(parsed.transfer_id) is None


@given(st.one_of(anything, st.dictionaries(st.sampled_from(sorted(PREFIX)), anything)))
def test_parse_prefix_refuses_or_returns_whatever_clients_send(proposed: Any) -> None:
    try:
        found = parse_prefix({"prefix_from": proposed})
    except BadParams:
        return
    if found is not None:
        assert found.lender.host
        assert 0 < found.lender.port < 65536
        assert 0 < found.tokens <= MAX_PREFIX_TOKENS
