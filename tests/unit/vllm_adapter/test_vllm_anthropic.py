"""The system prompt of Anthropic's API, as the router reads it and as vLLM renders it."""

import json
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

from kv_connector.router.bodies.messages import read

BILLING = "x-anthropic-billing-header: cc_version=2.1.15.d3f; cc_entrypoint=cli; cch=a1b2c;"

# A module in vLLM 0.32, a package in 0.33.
CHAT_UTILS = "vllm.renderers.chat_utils"
SPEC = find_spec(CHAT_UTILS)
PACKAGE = SPEC is not None and SPEC.submodule_search_locations is not None
CHAT_MESSAGES = import_module(f"{CHAT_UTILS}.chat_message" if PACKAGE else CHAT_UTILS)


def block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}


def rendered(system: Any) -> list[str]:
    """Returns the texts of the system messages that vLLM's chat template gets."""
    body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}], "system": system}
    request = AnthropicMessagesRequest.model_validate(body)
    messages: Any = AnthropicServingMessages.to_chat_completion_request(request).messages
    return ["".join(texts(message["content"])) for message in messages if message["role"] == "system"]


def texts(content: str) -> list[str]:
    parts: Any = CHAT_MESSAGES._strip_claude_code_billing_header([{"type": "text", "text": content}])
    return [part["text"] for part in parts]


@pytest.mark.parametrize(
    "system",
    [
        "You are Claude Code.",
        [block("You are "), block("Claude Code.")],
        [block(BILLING), block("You are Claude Code.")],
        [block("You are Claude Code."), block(BILLING), block("Be brief.")],
        [block(f"{BILLING}\nmore"), block("You are Claude Code.")],
        [block(BILLING)],
        [block("")],
        f"{BILLING}\nYou are Claude Code.",
        f"{BILLING}\n",
        BILLING,
        f" {BILLING}",
        "",
        [],
    ],
)
def test_router_reads_the_system_prompt_that_vllm_renders(system: Any) -> None:
    seen = read("system", json.dumps(system).encode())
    assert seen is not None
    assert seen.messages == [[f"system\0\0{text}".encode()] for text in rendered(system)]
