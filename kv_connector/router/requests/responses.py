"""ResponsesRequest: a request to /v1/responses, and what keeps its prompt from being shared."""

import msgspec

from kv_connector.router.failure import UNREADABLE
from kv_connector.router.requests.completion import Body, Completion

# A hundred tools with long descriptions. As objects, 1 MiB of `{}` in a list is 20 MiB. Longer lists go to a
# decode engine alone, which is right for all tools.
_LONGEST_TOOLS = 1 << 20


class ResponsesRequest(Completion):
    """The decoded body of /v1/responses."""

    goes_to_named_rank = False

    def local_reason(self) -> str | None:
        """Why this request must be prefilled by the decode engine itself; None if P and D can share it.

        What was stored is in the memory of one API server. And with a tool that the engine calls itself, vLLM
        sends the prompt of each turn under the request's one set of kv_transfer_params.
        """
        if self.body.get("background") or self.body.get("previous_response_id"):
            return "stored_response"
        tools = self.body.get("tools")
        if isinstance(tools, msgspec.Raw):
            return None if _called_by_client_alone(tools) else "engine_tools"
        if isinstance(tools, list) and not all(_called_by_client(tool) for tool in tools):
            return "engine_tools"
        return None

    def _one_token(self) -> Body:
        return {"max_output_tokens": 1, "store": False}


_OF_CLIENTS = ("function", "custom")
"""Types of the tools that a client calls itself."""


def _called_by_client(tool: object) -> bool:
    return isinstance(tool, dict) and tool.get("type") in _OF_CLIENTS


class _Tool(msgspec.Struct):
    type: str


def _called_by_client_alone(tools: msgspec.Raw) -> bool:
    """Whether clients call every tool of a long list, which is read without making objects of its fields."""
    if len(memoryview(tools)) > _LONGEST_TOOLS:
        return False
    try:
        found = msgspec.json.decode(tools, type=list[_Tool])
    except UNREADABLE:
        return False
    return all(tool.type in _OF_CLIENTS for tool in found)
