from kv_connector.lab.bench.contestants.libfabric import WHEEL_LIBRARY, require

require("tcp", WHEEL_LIBRARY)
