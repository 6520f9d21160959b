"""The rooms of the project and what each may import, as the tests enforce it and the picture shows it.

A room is a folder of `kv_connector`, of `kv_connector/router` or of `native`. tests/unit/house/test_rooms.py
and test_native_includes.py compare the source with these tables, and scripts/rooms_picture.py draws them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet

# A room may import only rooms above it: no import can lead back.
ROOMS: dict[str, set[str]] = {
    "protocol": set(),
    "engine": {"_native"},
    "control": {"protocol"},
    "agent": {"protocol", "engine", "control"},
    "weights": {"protocol", "engine", "control", "agent"},
    "moe": {"engine", "_native"},
    "vllm": {"protocol", "engine", "control", "agent", "weights", "moe"},
    "sglang": {"protocol", "engine", "control", "agent", "weights", "moe"},
    "ray": {"vllm"},
    "verl": {"protocol", "control", "weights"},
    "router": {"protocol", "control"},
    "lab": {"protocol", "control", "agent"},
    "bench": {"protocol", "engine", "agent", "moe", "lab", "_bench"},
    "cli": {"protocol", "engine", "control", "agent", "weights", "moe", "router", "lab", "bench"},
}
# The router's rooms and modules, by the same rule.
ROUTER: dict[str, set[str]] = {
    "failure": set(),
    "forever": set(),
    "bodies": {"failure"},
    "engines": {"failure", "bodies"},
    "settings": {"engines"},
    "requests": {"failure", "bodies", "engines"},
    "observe": {"engines", "requests"},
    "placement": {"bodies", "engines", "settings", "requests"},
    "streams": {"failure", "forever", "bodies", "engines", "settings", "observe", "requests", "placement"},
    "front": {
        "failure",
        "forever",
        "bodies",
        "engines",
        "settings",
        "observe",
        "requests",
        "placement",
        "streams",
    },
}

# The folders and modules of the other large rooms, the lowest floor first. Each imports only folders and
# modules of lower floors.
FLOORS: dict[str, list[list[str]]] = {
    "protocol": [
        ["pages", "timeouts", "timers"],
        ["wire"],
        ["admission", "plans"],
        ["actions"],
        ["params", "requests", "session"],
        ["page_sums"],
        ["decode", "prefill"],
    ],
    "agent": [
        ["checkpoint_reader", "commands", "config", "interfaces", "layer_progress", "settings"],
        ["reports"],
        ["loop"],
        ["agent"],
        ["command_runner", "metrics"],
        ["exposition", "start"],
    ],
    "weights": [
        ["mapping", "metrics", "settings"],
        ["memory", "wire"],
        ["controller", "sources", "tensor_stream", "update"],
        ["block_fp8", "megatron", "trainer", "verify"],
        ["pusher"],
        ["seeding"],
        ["launch", "worker"],
    ],
    "vllm": [
        ["dialects", "forced_token", "internals", "release_0_32", "release_0_33", "spans", "step_requests"],
        ["metadata", "metrics", "model", "process"],
        ["encoder", "experts", "patches", "worker_side"],
        ["scheduling"],
        ["connector"],
        ["kept_cache"],
        ["plugin"],
        ["weights"],
    ],
}

PROVIDERS = {
    f"providers/{name}"
    for name in ("bounce", "host", "libfabric", "nvlink", "shuffle", "sim", "tcp", "verbs")
}
# The rooms of the native code, by includes of headers.
NATIVE_ROOMS: dict[str, set[str]] = {
    "base": set(),
    "lane": {"base"},
    "cuda": {"base", "lane"},
    "engine": {"base", "lane", "cuda"},
    "moe": {"base", "lane", "cuda", "engine"},
    "providers/same_host": {"base", "lane"},
    "providers/sim": {"base", "lane"},
    "providers/shuffle": {"base", "lane"},
    "providers/tcp": {"base", "lane", "cuda"},
    "providers/verbs": {"base", "lane", "cuda"},
    "providers/libfabric": {"base", "lane", "cuda"},
    "providers/bounce": {"base", "lane", "cuda"},
    "providers/host": {"base", "lane", "cuda", "providers/same_host"},
    "providers/nvlink": {"base", "lane", "cuda", "providers/same_host"},
    "providers/factory": {"base", "lane", *PROVIDERS},
    "python": {"base", "lane", "cuda", "moe", "engine", "providers/factory"},
    "bench": {"base", "lane", "cuda", "moe", "engine", "providers/factory"},
}

# What a room is, in the short form of the picture.
IN_WORDS = {
    "_bench": "loops that bench times",
    "_native": "the Python extension",
    "bodies": "fields of long requests",
    "engines": "P and D as they are",
    "failure": "errors for clients",
    "forever": "tasks that never end",
    "front": "HTTP, pages, registry",
    "observe": "metrics, spans, logs",
    "placement": "which engine takes it",
    "requests": "completions, events",
    "settings": "options of the router",
    "streams": "a request on its way",
    "agent": "one thread of a worker",
    "base": "errors, rings, clocks",
    "bench": "measurements",
    "cli": "kv-connector",
    "control": "sockets, keys, members",
    "cuda": "driver, kernels",
    "engine": "transfers, counters",
    "lab": "engines on this machine",
    "lane": "what a lane implements",
    "moe": "tokens to experts",
    "protocol": "state machines, layouts",
    "providers/factory": "opens a lane by name",
    "providers/bounce": "over another lane",
    "providers/host": "shared host memory",
    "providers/libfabric": "EFA and others",
    "providers/nvlink": "GPU to GPU",
    "providers/same_host": "host and nvlink",
    "providers/shuffle": "reorders another lane",
    "providers/sim": "for tests",
    "providers/tcp": "sockets",
    "providers/verbs": "ConnectX",
    "python": "_native",
    "ray": "Ray Serve LLM",
    "router": "requests to P and D",
    "sglang": "SGLang's adapter",
    "verl": "verl's adapter",
    "vllm": "vLLM's adapter",
    "weights": "new weights",
}


def ways_back(table: Mapping[str, AbstractSet[str]], below: Iterable[str] = ()) -> dict[str, set[str]]:
    """Returns a table's imports that lead neither to an earlier room of it nor to one of ``below``."""
    known, found = set(below), dict[str, set[str]]()
    for room, rooms in table.items():
        if wrong := rooms - known:
            found[room] = set(wrong)
        known.add(room)
    return found
