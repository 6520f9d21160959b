"""Schemas of the custom resources that the chart makes, with the fields that it uses and no others."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

_STRING: Schema = {"type": "string"}
_LABELS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}


def _closed(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": list(required),
        "properties": properties,
    }


def _resource(api_version: str, spec: Schema) -> Schema:
    metadata = _closed(("name",), name=_STRING, labels=_LABELS, annotations=_LABELS)
    return _closed(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion={"const": api_version},
        kind=_STRING,
        metadata=metadata,
        spec=spec,
    )


_LEADER_WORKER_SET = _closed(
    ("leaderWorkerTemplate",),
    replicas={"type": "integer", "minimum": 0},
    rolloutStrategy=_closed(
        ("type",),
        type={"const": "RollingUpdate"},
        rollingUpdateConfiguration=_closed(maxSurge={"type": "integer"}, maxUnavailable={"type": "integer"}),
    ),
    leaderWorkerTemplate=_closed(
        ("size", "workerTemplate"),
        size={"type": "integer", "minimum": 1},
        restartPolicy={"enum": ["RecreateGroupOnPodRestart", "None"]},
        leaderTemplate={"type": "object"},
        workerTemplate={"type": "object"},
    ),
)

_POD_MONITOR = _closed(
    ("selector", "podMetricsEndpoints"),
    selector=_closed(matchLabels=_LABELS),
    podTargetLabels={"type": "array", "items": _STRING},
    podMetricsEndpoints={
        "type": "array",
        "items": _closed(
            port=_STRING,
            path=_STRING,
            interval={"type": "string", "pattern": r"^\d+s$"},
            relabelings={
                "type": "array",
                "items": _closed(
                    action={"enum": ["drop"]},
                    sourceLabels={"type": "array", "items": _STRING},
                    regex=_STRING,
                ),
            },
        ),
    },
)

_RULE = _closed(
    ("expr",),
    record=_STRING,
    alert=_STRING,
    expr=_STRING,
    labels=_LABELS,
    annotations=_LABELS,
    **{"for": {"type": "string", "pattern": r"^\d+[smh]$"}},
)
_PROMETHEUS_RULE = _closed(
    groups={
        "type": "array",
        "items": _closed(("name", "rules"), name=_STRING, rules={"type": "array", "items": _RULE}),
    }
)

CRDS: dict[str, Schema] = {
    "LeaderWorkerSet": _resource("leaderworkerset.x-k8s.io/v1", _LEADER_WORKER_SET),
    "PodMonitor": _resource("monitoring.coreos.com/v1", _POD_MONITOR),
    "PrometheusRule": _resource("monitoring.coreos.com/v1", _PROMETHEUS_RULE),
}
