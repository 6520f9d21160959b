from kv_connector.lab.bench.contestants.libfabric import require

require("shm")
