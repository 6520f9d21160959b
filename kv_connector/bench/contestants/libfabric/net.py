from kv_connector.bench.contestants.libfabric import require

require("net")
