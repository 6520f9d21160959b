from kv_connector.bench.contestants.libfabric import WHEEL_LIBRARY, require

require("tcp", WHEEL_LIBRARY)
