"""Our engine over libfabric, as the yardstick for our own tcp and host lanes.

It is measured with the system's library, and with the newer library of MPICH's wheel. Each module of this
package can be imported only if its contestant is available. The tables leave a contestant out by that import
error.
"""

import os
import sys
from pathlib import Path

from kv_connector.engine import DomainConfig, EngineConfig, TransferError
from kv_connector.engine.transfer_engine import TransferEngine

WHEEL_LIBRARY = str(Path(sys.prefix, "lib", "mpich", "libfabric.so.1"))
"""The path at which `pip install mpich` puts the library."""


def require(device: str, library: str | None = None) -> None:
    """Raises ImportError if this libfabric provider cannot be opened."""
    if library is not None:
        os.environ["KV_CONNECTOR_LIBFABRIC"] = library
    try:
        TransferEngine(EngineConfig("probe", [DomainConfig("libfabric", device=device)])).close()
    except TransferError as error:
        raise ImportError(str(error)) from None
