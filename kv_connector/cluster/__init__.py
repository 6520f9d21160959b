"""A P/D cluster on this machine: small models, engine processes, the router. For the demo and the tests."""

from kv_connector.cluster.cluster import Dispatch, Engine, EngineSettings, LocalCluster, Role
from kv_connector.cluster.completion import Answer, CompletionError, complete
from kv_connector.cluster.model import make_gemma3, make_llama, make_mixtral
from kv_connector.cluster.process import Process, StartError

__all__ = [
    "Answer",
    "CompletionError",
    "Dispatch",
    "Engine",
    "EngineSettings",
    "LocalCluster",
    "Process",
    "Role",
    "StartError",
    "complete",
    "make_gemma3",
    "make_llama",
    "make_mixtral",
]
