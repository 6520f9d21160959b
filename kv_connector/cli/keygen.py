"""kv-connector keygen: creates the key that a cluster's engines and routers share."""

from pathlib import Path
from typing import Annotated

import typer

from kv_connector.control.cluster_key import KEY_FILE_VARIABLE, ClusterKey


def keygen(
    file: Annotated[Path, typer.Argument(help="File for the key. An existing file is not replaced.")],
) -> None:
    """Writes a new cluster key, readable by its owner alone.

    Copy the file to the host of every engine and router.
    """
    try:
        ClusterKey.generate().write(file)
    except FileExistsError:
        raise typer.BadParameter(f"{file} exists. To replace the key, remove the file first") from None
    except FileNotFoundError:
        raise typer.BadParameter(f"the directory {file.parent} does not exist. Create it first") from None
    except OSError as error:
        raise typer.BadParameter(f"cannot write {file}: {error.strerror}") from None
    typer.echo(
        f'{file}: set it in each engine\'s kv_connector_extra_config ("control_key_file") and in the '
        f"router's --key-file, or in {KEY_FILE_VARIABLE}."
    )
