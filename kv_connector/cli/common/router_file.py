"""The router's configuration file: the options of `kv-connector router`, as YAML or JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from kv_connector.agent.settings import nearest
from kv_connector.cli.config.files import documents

# 500 engines are 32 KB. A larger file was named by mistake, and would take seconds to read.
_LONGEST = 64 << 10

NOT_IN_FILE = ("config", "help")
"""Options that a file cannot have."""


class RouterFileError(ValueError):
    """The file cannot be used. The message says what to change."""


def read_router_file(path: Path, options: Collection[Any]) -> dict[str, Any]:
    """Returns the defaults that a file has for the command's options. Raises RouterFileError.

    ``options``: the parameters of the command, as typer has them.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_LONGEST + 1)
    except OSError as error:
        raise RouterFileError(f"cannot read {path}: {error.strerror}") from None
    if len(text) > _LONGEST:
        raise RouterFileError(f"{path} is longer than {_LONGEST} bytes, the most for a configuration file")
    try:
        found = documents(text.decode())
        root = yaml.compose(text, yaml.SafeLoader) if len(found) == 1 else None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RouterFileError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise RouterFileError(f"{path} is nested too deeply") from None
    if len(found) != 1 or not isinstance(found[0], dict):
        raise RouterFileError(f"{path} must be one mapping of options, for example `port: 8000`")
    assert root is not None
    # YAML's loader keeps the last value: of two lines `decode`, the first would have no effect.
    for key, count in Counter(str(key.value) for key, _ in root.value).items():
        if count > 1:
            raise RouterFileError(f"{path}: `{key}` is given twice. Write several values as a list")
    return defaults(str(path), found[0], options)


def defaults(where: str, document: Mapping[Any, Any], options: Collection[Any]) -> dict[str, Any]:
    """Returns the values of a file by the names of the command's parameters. Raises RouterFileError."""
    known = {one.name: one for one in options if one.name not in NOT_IN_FILE}
    written = [name.replace("_", "-") for name in known]
    found: dict[str, Any] = {}
    for key, value in document.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise RouterFileError(f"{where}: unknown option `{key}`{nearest(str(key), written)}")
        if name in found:
            raise RouterFileError(f"{where}: `{key}` is given twice")
        found[name] = _checked(where, str(key), value, known[name])
    return found


def _checked(where: str, key: str, value: Any, option: Any) -> Any:
    if option.multiple:
        values: Sequence[Any] = value if isinstance(value, list) else [value]
        if all(isinstance(one, str) for one in values):
            return list(values)
        raise RouterFileError(f"{where}: `{key}` must be a text, or a list of texts")
    if option.is_flag:
        if isinstance(value, bool):
            return value
        raise RouterFileError(f"{where}: `{key}` must be true or false")
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        # Parsers of texts, such as that of an address, expect a text.
        return str(value)
    raise RouterFileError(f"{where}: `{key}` must be a text or a number")
