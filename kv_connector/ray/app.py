"""build_pd_app: the function that a Serve configuration names as its ``import_path``."""

from __future__ import annotations

from typing import Any

from kv_connector.ray.backend import WriteImmBackend
from kv_connector.ray.internals import build_pd_openai_app, register_backend
from kv_connector.vllm.plugin import CONNECTOR


def build_pd_app(args: dict[str, Any]) -> Any:
    """Ray's own application of P and D, ``build_pd_openai_app`` with the same arguments, whose replicas can
    use WriteImmConnector.
    """
    register_backend(CONNECTOR, WriteImmBackend)
    return build_pd_openai_app(args)
