"""ResponsesRequest: a request to /v1/responses, and the reasons why two engines cannot share its prompt."""

import msgspec

from kv_connector.router.failure import UNREADABLE
from kv_connector.router.requests.completion import Body, Completion

# Enough for a hundred tools with long descriptions. As objects, 1 MiB of `{}` in a list is 20 MiB. A request
# with a longer list goes to a decode engine alone, which is right for all tools.
_LONGEST_TOOLS = 1 << 20


class ResponsesRequest(Completion):
    """The decoded body of /v1/responses."""

    goes_to_named_rank = False

    def local_reason(self) -> str | None:
        """Returns why the decode engine must compute this prompt itself; None if two engines can share the
        request.

        A stored response is in the memory of one API server. If the engine itself calls a tool, vLLM sends
        the prompt of each turn under the request's only set of kv_transfer_params.
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
"""Types of the tools that a client itself calls."""


def _called_by_client(tool: object) -> bool:
    return isinstance(tool, dict) and tool.get("type") in _OF_CLIENTS


class _Tool(msgspec.Struct):
    type: str


def _called_by_client_alone(tools: msgspec.Raw) -> bool:
    """Returns whether clients call every tool of a long list. The list is read without making objects of its
    fields."""
    if len(memoryview(tools)) > _LONGEST_TOOLS:
        return False
    try:
        found = msgspec.json.decode(tools, type=list[_Tool])
    except UNREADABLE:
        return False
    return all(tool.type in _OF_CLIENTS for tool in found)
