"""The environment variables that kv-connector reads, with descriptions."""

from kv_connector.agent.settings import SETTINGS_VARIABLE
from kv_connector.control.cluster_key import KEY_FILE_VARIABLE
from kv_connector.weights.settings import SETTINGS_VARIABLE as WEIGHTS_VARIABLE

VARIABLES = {
    KEY_FILE_VARIABLE: (
        "File of the cluster key, for engines without `control_key_file`, for routers and commands without "
        "`--key-file`, and for trainers without `WeightPusher(key_file=...)`."
    ),
    SETTINGS_VARIABLE: "Settings of SGLang servers, as a JSON object.",
    WEIGHTS_VARIABLE: "Settings for weights of vLLM and SGLang engines, as a JSON object.",
    "KV_CONNECTOR_MOE": (
        "`1`: vLLM and SGLang engines with data and expert parallelism send tokens to their experts, and "
        "sums back, over kv-connector (docs/moe.md)."
    ),
    "KV_CONNECTOR_LIBFABRIC": (
        "Library that the lane `libfabric` opens: a file, or a name for the dynamic linker. Default: "
        "`libfabric.so.1` if the linker finds it, else the library in MPICH's wheel."
    ),
}
"""Variables of kv-connector."""

OTHERS = {
    "OPENAI_API_KEY": "Bearer token that `kv-connector bench conversations` sends to its endpoints.",
    "VLLM_HOST_IP": (
        "vLLM's address of this host. With a cluster key and without `control_host`, the control sockets "
        "bind it."
    ),
    "VLLM_PLUGINS": (
        "vLLM's list of plugins to load. Without `kv_connector` in it, vLLM does not find "
        "`WriteImmConnector` by its name, and an engine cannot take weights."
    ),
    "VLLM_KV_CACHE_LAYOUT": (
        "vLLM's order of a block in memory: `HND` or `NHD`. It overrides `HND`, which `WriteImmConnector` "
        "requests."
    ),
    "VLLM_CPU_OMP_THREADS_BIND": "vLLM's cores of an engine on CPUs. `worker_cpu` `auto` avoids them.",
    "GOMP_CPU_AFFINITY": "OpenMP's cores of an engine on CPUs. `worker_cpu` `auto` avoids them.",
    "KMP_AFFINITY": "OpenMP's cores of an engine on CPUs. `worker_cpu` `auto` avoids them.",
    "OMP_PLACES": "OpenMP's cores of an engine on CPUs. `worker_cpu` `auto` avoids them.",
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": (
        "OpenTelemetry's protocol for the spans of vLLM and the router: `grpc` (the default) or "
        "`http/protobuf`."
    ),
    "OTEL_SERVICE_NAME": "OpenTelemetry's service name in the router's spans. Default: "
    "`kv-connector-router`.",
}
"""Variables of other software that change what kv-connector does."""
