"""WriteImmBackend: how Ray Serve LLM's orchestrator, on D, has P and D work on a request at once."""

from __future__ import annotations

import uuid
from typing import Any

from kv_connector.ray.internals import BaseConnectorBackend, clamp_request_to_single_token, node_address

# A P and a D may share a node; the replicas of each count up from here.
PREFILL_PORT, DECODE_PORT = 5600, 6600


class WriteImmBackend(BaseConnectorBackend):  # type: ignore[misc]  # Ray is not typed for mypy
    """One in each replica, be it P or D."""

    requires_peer_binding = True
    """D picks a replica of P first, and knows its address."""
    concurrent_handoff = True

    def setup(self) -> None:
        """Before the engine starts: where its connector listens. An operator's own ``control_host`` stays;
        his ``control_port`` is the first replica's.
        """
        extra = self._extra_config
        extra.setdefault("control_host", node_address())
        decodes = self.kv_transfer_config.get("kv_role") == "kv_consumer"
        first = extra.get("control_port", DECODE_PORT if decodes else PREFILL_PORT)
        rank = self.llm_config.engine_kwargs.get("data_parallel_rank")
        if isinstance(rank, int) and rank >= 0:
            # Ray counts these by one. The connector itself counts on from the first one's port.
            extra["control_port"] = first
            self._port = first + rank * self.llm_config.get_engine_config().num_devices
        else:
            extra["control_port"] = self._port = first + self._compute_port_offset()

    def replica_metadata(self) -> dict[str, Any]:
        """What D gets to know of this P."""
        # None where the ranks are on several nodes. The first is on the replica's.
        host = self._extra_config["control_host"] or node_address()
        return {"remote_host": host, "remote_port": self._port}

    def prepare_prefill_request(self, *, request: Any, peer: dict[str, Any] | None) -> Any:
        """P's half: the same prompt, one token.

        It is asked for first, and leaves the transfer's name on the request: a client may give two requests
        the same id. What the client itself says of transfers ends here.
        """
        transfer = {"transfer_id": uuid.uuid4().hex}
        request.kv_transfer_params = transfer
        half = request.model_copy(deep=True)
        half.kv_transfer_params = {"do_remote_decode": True, "do_remote_prefill": False, **transfer}
        clamp_request_to_single_token(half)
        half.min_tokens = 0
        # One sample fills the pages that all of D's read.
        half.n = 1
        return half

    def prepare_decode_request(
        self, *, request: Any, peer: dict[str, Any] | None, prefill_response: Any
    ) -> Any:
        """D's half of the same request. ``peer``: the metadata of the replica that has P's."""
        if not peer or not peer.keys() >= {"remote_host", "remote_port"}:
            raise ValueError(
                "the prefill replica does not report where its connector listens. Its kv_transfer_config "
                "must name WriteImmConnector, outside of MultiConnector, whose address Ray does not pass on"
            )
        half = request.model_copy(deep=True)
        half.kv_transfer_params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            **request.kv_transfer_params,
            **peer,
        }
        return half

    @property
    def _extra_config(self) -> dict[str, Any]:
        extra: dict[str, Any] = self.kv_transfer_config.setdefault("kv_connector_extra_config", {})
        return extra
