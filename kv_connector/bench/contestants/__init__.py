"""The contestants, in the order of the tables."""

from functools import partial

from kv_connector.bench.contestant import Contestant
from kv_connector.bench.contestants.baseline import MemoryCopySide, PlainSocketSide, ProcessWriteSide
from kv_connector.bench.contestants.libfabric import WHEEL_LIBRARY
from kv_connector.bench.contestants.mooncake import MooncakeSide
from kv_connector.bench.contestants.nixl import NixlSide
from kv_connector.bench.contestants.ours import EngineSide
from kv_connector.bench.lane import Lane

_QUIET_NIXL = {"NIXL_LOG_LEVEL": "ERROR", "UCX_LOG_LEVEL": "error"}
_WHEEL = {"KV_CONNECTOR_LIBFABRIC": WHEEL_LIBRARY}
_LIBFABRIC = "kv_connector.bench.contestants.libfabric"
_QUIET_MOONCAKE = {"MC_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "2"}

CONTESTANTS = (
    Contestant("memcpy", "memcpy, one core", MemoryCopySide, shared_pool=True),
    Contestant("process_vm_writev", "process_vm_writev", ProcessWriteSide),
    Contestant("socket", "plain TCP socket", PlainSocketSide),
    Contestant(
        "host-shared", "host, shared memory", partial(EngineSide, lane=Lane("host")), shared_pool=True
    ),
    Contestant("host", "host, foreign memory", partial(EngineSide, lane=Lane("host"))),
    Contestant("tcp", "tcp", partial(EngineSide, lane=Lane("tcp"))),
    Contestant(
        "libfabric-net",
        "libfabric net, system's library",
        partial(EngineSide, lane=Lane("libfabric", ("net",))),
        module=f"{_LIBFABRIC}.net",
    ),
    Contestant(
        "libfabric-shm",
        "libfabric shm, system's library",
        partial(EngineSide, lane=Lane("libfabric", ("shm",))),
        module=f"{_LIBFABRIC}.shm",
    ),
    Contestant(
        "libfabric2-tcp",
        "libfabric tcp, MPICH's wheel",
        partial(EngineSide, lane=Lane("libfabric", ("tcp",))),
        module=f"{_LIBFABRIC}.wheel",
        environment=_WHEEL,
    ),
    Contestant(
        "libfabric2-shm",
        "libfabric shm, MPICH's wheel",
        partial(EngineSide, lane=Lane("libfabric", ("shm",))),
        module=f"{_LIBFABRIC}.wheel",
        environment=_WHEEL,
    ),
    Contestant(
        "nixl",
        "NIXL UCX, as it comes",
        partial(NixlSide, progress_thread=True),
        module="nixl._api",
        environment=_QUIET_NIXL,
    ),
    Contestant(
        "nixl-polled",
        "NIXL UCX, caller polls",
        partial(NixlSide, progress_thread=False),
        module="nixl._api",
        environment=_QUIET_NIXL,
    ),
    Contestant(
        "nixl-tcp",
        "NIXL UCX tcp, caller polls",
        partial(NixlSide, progress_thread=False),
        module="nixl._api",
        environment={**_QUIET_NIXL, "UCX_TLS": "tcp"},
    ),
    Contestant(
        "mooncake", "Mooncake tcp", MooncakeSide, module="mooncake.engine", environment=_QUIET_MOONCAKE
    ),
)
