"""Bodies that are made to hold up the router: nested, or full of small parts."""

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import pytest

from kv_connector.router.bodies.fields import Pieces
from kv_connector.router.bodies.messages import ChatMessage
from kv_connector.router.failure import Failure
from kv_connector.router.requests.completion import Completion
from kv_connector.router.requests.responses_api import ResponsesRequest

T = TypeVar("T")

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")


def below(frames: int, call: Callable[[], T]) -> T:
    """Calls with a deeper stack: the router reads a body again where fewer levels are left."""
    return call() if frames == 0 else below(frames - 1, call)


def used(completion: Completion) -> list[Any]:
    """Returns all that the router uses of a request."""
    return [
        completion.local_reason(),
        completion.late_reason(),
        completion.model,
        *map(completion.prompt, PATHS),
        completion.local_body(ids=True),
        completion.prefill_body("t", serial=False, early=True),
        completion.decode_body({"a": 1}),
    ]


@pytest.mark.parametrize("kind", [Completion, ResponsesRequest])
@pytest.mark.parametrize(("open", "close"), ["[]", ('{"a":', "}")])
@pytest.mark.parametrize(
    "field",
    [
        *("prompt", "messages", "input", "system", "tools", "metadata", "prompt_embeds", "vllm_xargs"),
        *("cache_salt", "model", "stop", "chat_template_kwargs"),
    ],
)
def test_nested_body_is_refused_or_can_be_used(
    kind: type[Completion], field: str, open: str, close: str
) -> None:
    limit = sys.getrecursionlimit()
    statuses = []
    for levels in range(limit - 200, limit + 10, 3):
        value = b"%s0%s" % (open.encode() * levels, close.encode() * levels)
        try:
            completion = kind.decode(b'{"%s":%s}' % (field.encode(), value))
        except Failure as refused:
            statuses.append(refused.status)
        else:
            statuses.append(200)
            below(60, partial(used, completion))
    assert {*statuses} <= {200, 400}
    assert 200 in statuses


def test_transfer_parameters_are_removed_from_nested_xargs() -> None:
    raw = b'{"vllm_xargs":{"kv_transfer_params":1,"top":%s1%s}}' % (b"[" * 300, b"]" * 300)
    body = Completion.decode(raw).local_body()
    assert not isinstance(body, Pieces)
    assert [*json.loads(body)["vllm_xargs"]] == ["top"]


def keys(count: int) -> dict[str, int]:
    return {f"{number:x}": 0 for number in range(count)}


def message(content: Any = "", **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **fields}


PART = {"type": "text", "text": ""}


@pytest.mark.parametrize(
    ("said", "bounded"),
    [
        ([message(**keys(100_000))], True),
        ([message(**keys(1014))], False),
        ([message(**keys(1015))], True),
        ([message("x" * 40_000, **keys(1400))], False),
        ([message(x=0)] * 93, False),
        ([message(x=0)] * 94, True),
        ([message()] * 2048, False),
        ([message()] * 2049, True),
        ([*[message()] * 2047, message(x=0)], False),
        ([*[message()] * 2048, message(x=0)], True),
        ([message([PART] * 2047)], False),
        ([message([PART] * 2048)], True),
        ([message(tool_calls=[{"function": {}}] * 2048)], True),
        ([message([{}] * 2000), message(x=0)], True),
        ([message([{"y": ";base64,"}] * 200)], True),
        ([message("{" * 100_000)], False),
        ([message('"role"' * 10_000)], False),
    ],
)
def test_prompt_of_too_many_parts_is_hashed_as_it_came(said: list[dict[str, Any]], bounded: bool) -> None:
    """A message that ChatMessage cannot read counts for eight fields more than it has."""
    text = json.dumps(said, separators=(",", ":"))
    for raw in (text.encode(), text.replace('"role"', '"r\\u006fle"').encode()):
        seen = Completion.decode(b'{"messages":%s}' % raw).prompt("/v1/chat/completions")
        assert (seen.tail.form == "") is bounded
        assert not bounded or seen.size == len(raw)


@pytest.mark.parametrize("count", [2049, 40_000])
def test_system_prompt_of_too_many_blocks_is_hashed_as_it_came(count: int) -> None:
    block = b'{"type":"text","text":""}'
    raw = b'{"messages":[],"system":[%s]}' % b",".join([block] * count)
    assert Completion.decode(raw).prompt("/v1/messages").size >= count * len(block)


def test_prompt_has_a_bounded_number_of_prefixes() -> None:
    said = [{"role": "user", "content": "x" * 200}] * 2048
    body = {"messages": said, "tools": [{"type": "function", "x": "y" * 100_000}]}
    seen = Completion.decode(json.dumps(body).encode()).prompt("/v1/chat/completions")
    assert len(seen.prefixes) == len(seen.ends) == 2048
    assert seen.size > 2048 * 200 + 100_000
    longer = seen.followed_by(ChatMessage(role="assistant", content="z" * 5000))
    assert longer.prefixes == seen.prefixes
    assert longer.size > seen.size + 5000


def test_prompt_is_read_once_for_all_attempts() -> None:
    completion = Completion.decode(b'{"messages":[{"role":"user","content":"Why?"}]}')
    seen = completion.prompt("/v1/chat/completions")
    assert completion.prompt("/v1/chat/completions") is seen
    assert completion.behind_its_token().prompt("/v1/chat/completions") is seen
