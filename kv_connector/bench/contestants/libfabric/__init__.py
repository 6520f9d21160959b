"""Our engine over libfabric, as the yardstick for our own tcp and host lanes.

With the library of the system, and with the newer one of MPICH's wheel. Each module here can be imported only
where its contestant can take part: that is how the tables leave one out.
"""

import os
import sys
from pathlib import Path

from kv_connector.engine import DomainConfig, EngineConfig, TransferError
from kv_connector.engine.transfer_engine import TransferEngine

WHEEL_LIBRARY = str(Path(sys.prefix, "lib", "mpich", "libfabric.so.1"))
"""Where `pip install mpich` puts it."""


def require(device: str, library: str | None = None) -> None:
    """Raises ImportError where this libfabric provider cannot be opened."""
    if library is not None:
        os.environ["KV_CONNECTOR_LIBFABRIC"] = library
    try:
        TransferEngine(EngineConfig("probe", [DomainConfig("libfabric", device=device)])).close()
    except TransferError as error:
        raise ImportError(str(error)) from None
