"""The environment variables that are read here, and what each says."""

from kv_connector.agent.settings import SETTINGS_VARIABLE
from kv_connector.control.cluster_key import KEY_FILE_VARIABLE
from kv_connector.weights.settings import SETTINGS_VARIABLE as WEIGHTS_VARIABLE

VARIABLES = {
    KEY_FILE_VARIABLE: (
        "File of the cluster key, for engines (where `control_key_file` is not set), routers and commands "
        "(where `--key-file` is not given)."
    ),
    SETTINGS_VARIABLE: "SGLang's servers: the settings, as a JSON object.",
    WEIGHTS_VARIABLE: "vLLM's engines that take weights: the settings for that, as a JSON object.",
    "KV_CONNECTOR_MOE": (
        "vLLM's engines with data and expert parallelism: `1` sends tokens to their experts, and sums back, "
        "over kv-connector (docs/moe.md)."
    ),
    "KV_CONNECTOR_LIBFABRIC": (
        "The libfabric that the lane `libfabric` opens: a file, or a name for the dynamic linker. By itself "
        "`libfabric.so.1` where the linker finds it, else the one in MPICH's wheel."
    ),
}
"""Ours."""

OTHERS = {
    "VLLM_HOST_IP": (
        "vLLM's: this host's address. With a cluster key the control sockets bind it, where `control_host` "
        "is not set."
    ),
    "VLLM_PLUGINS": (
        "vLLM's: plugins to load. A list without `kv_connector` keeps `WriteImmConnector` from being known "
        "by its name; `kv_connector` has to be named for an engine that takes weights."
    ),
    "VLLM_KV_CACHE_LAYOUT": (
        "vLLM's: `HND` or `NHD`, how a block lies in memory. It goes before `HND`, which `WriteImmConnector` "
        "asks for."
    ),
    "VLLM_CPU_OMP_THREADS_BIND": "vLLM's: cores of an engine on CPUs. `worker_cpu` `auto` keeps off them.",
    "GOMP_CPU_AFFINITY": "OpenMP's: the same.",
    "KMP_AFFINITY": "OpenMP's: the same.",
    "OMP_PLACES": "OpenMP's: the same.",
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": (
        "OpenTelemetry's: `grpc` (the default) or `http/protobuf`, of vLLM's spans and the router's."
    ),
    "OTEL_SERVICE_NAME": "OpenTelemetry's: what spans say they are from. Default: `kv-connector-router`.",
}
"""Others', on which it depends what we do."""
