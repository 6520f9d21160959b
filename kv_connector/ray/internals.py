"""The only module that imports Ray.

Ray Serve LLM has a backend of each connector divide the requests. It calls that interface internal, and has a
registry for backends of other packages. A Ray without the names that these files were written for is refused.
"""

from __future__ import annotations

import os
from typing import Any

_NEEDED = ("requires_peer_binding", "concurrent_handoff", "prepare_decode_request", "replica_metadata")


class UnsupportedRay(ImportError):
    """No release of Ray is installed that this package supports."""

    def __init__(self, problem: str) -> None:
        super().__init__(
            f"kv_connector.ray needs Ray Serve LLM 2.60: {problem}. Install the releases that "
            "examples/ray/README.md names"
        )


try:
    from ray import __version__ as RAY_VERSION
    from ray.llm._internal.serve.engines.vllm.kv_transfer.base import (
        BaseConnectorBackend,
        clamp_request_to_single_token,
    )
    from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import KVConnectorBackendFactory
    from ray.serve.llm import build_pd_openai_app
    from ray.util import get_node_ip_address
except ImportError as error:
    raise UnsupportedRay(str(error)) from error

__all__ = [
    "BaseConnectorBackend",
    "build_pd_openai_app",
    "clamp_request_to_single_token",
    "node_address",
    "register_backend",
]

if missing := [name for name in _NEEDED if not hasattr(BaseConnectorBackend, name)]:
    raise UnsupportedRay(f"this is Ray {RAY_VERSION}, whose connector backends have no {', '.join(missing)}")


def node_address() -> str:
    """This node's address, as the other nodes of the cluster reach it, and as vLLM's processes on it use
    it."""
    address: str = os.environ.get("VLLM_HOST_IP") or get_node_ip_address()
    return address


def register_backend(connector: str, backend: type[Any]) -> None:
    """Makes the backend known to every replica of the cluster. Ray must already run. Idempotent."""
    if not KVConnectorBackendFactory.is_registered(connector):
        KVConnectorBackendFactory.register_backend(connector, f"{backend.__module__}:{backend.__qualname__}")
