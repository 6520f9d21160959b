"""WriteImmBackend: lets Ray Serve LLM's orchestrator, on D, dispatch a request to P and D at once."""

from __future__ import annotations

import uuid
from typing import Any

from kv_connector.ray.internals import BaseConnectorBackend, clamp_request_to_single_token, node_address

# A P and a D may share a node. The replicas of each role count up from its port.
PREFILL_PORT, DECODE_PORT = 5600, 6600


class WriteImmBackend(BaseConnectorBackend):  # type: ignore[misc]  # Ray is not typed for mypy
    """The backend of one replica, P or D."""

    requires_peer_binding = True
    """D chooses a replica of P first, and knows its address."""
    concurrent_handoff = True

    def setup(self) -> None:
        """Sets the address of the connector before the engine starts. An operator's ``control_host`` is kept.
        The operator's ``control_port`` is that of the first replica.
        """
        extra = self._extra_config
        extra.setdefault("control_host", node_address())
        decodes = self.kv_transfer_config.get("kv_role") == "kv_consumer"
        first = extra.get("control_port", DECODE_PORT if decodes else PREFILL_PORT)
        rank = self.llm_config.engine_kwargs.get("data_parallel_rank")
        if isinstance(rank, int) and rank >= 0:
            # Ray numbers these ranks consecutively. The connector itself counts from the first rank's port.
            extra["control_port"] = first
            self._port = first + rank * self.llm_config.get_engine_config().num_devices
        else:
            extra["control_port"] = self._port = first + self._compute_port_offset()

    def replica_metadata(self) -> dict[str, Any]:
        """The address of this P, for D."""
        # None if the ranks are on several nodes. The first rank is on the replica's node.
        host = self._extra_config["control_host"] or node_address()
        return {"remote_host": host, "remote_port": self._port}

    def prepare_prefill_request(self, *, request: Any, peer: dict[str, Any] | None) -> Any:
        """P's half: the same prompt, one token.

        Ray calls this method first. It stores the transfer's id on the request, because a client may give two
        requests the same id. The client's own transfer parameters are dropped.
        """
        transfer = {"transfer_id": uuid.uuid4().hex}
        request.kv_transfer_params = transfer
        half = request.model_copy(deep=True)
        half.kv_transfer_params = {"do_remote_decode": True, "do_remote_prefill": False, **transfer}
        clamp_request_to_single_token(half)
        half.min_tokens = 0
        # One sample fills the pages that all samples of D read.
        half.n = 1
        return half

    def prepare_decode_request(
        self, *, request: Any, peer: dict[str, Any] | None, prefill_response: Any
    ) -> Any:
        """D's half of the same request. ``peer``: the metadata of the replica with P's half."""
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
