"""All imports of verl and of Ray: the interface of checkpoint engines, as verl 0.9.1 has it."""

from __future__ import annotations

from ray.util import get_node_ip_address
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

__all__ = ["CheckpointEngine", "CheckpointEngineRegistry", "node_address"]


def node_address() -> str:
    """The address at which other nodes of the Ray cluster reach this node."""
    return str(get_node_ip_address()).strip("[]")
