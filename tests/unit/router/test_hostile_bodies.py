"""Bodies that are made to hold up the router: nested, or full of small parts."""

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import pytest

from kv_connector.router.bodies.fields import Pieces
from kv_connector.router.failure import Failure
from kv_connector.router.requests.completion import Completion
from kv_connector.router.requests.responses import ResponsesRequest

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
