"""What a command's exit status says: the same of every command."""

from enum import IntEnum


class ExitStatus(IntEnum):
    SUCCESS = 0
    """What was asked for is done, or is so."""
    FAILURE = 1
    """It is not: an engine cannot run here, a pair does not fit, a configuration is wrong, an output differs,
    a measurement failed or missed its aim, an engine is still busy. The output says which."""
    USAGE = 2
    """The command cannot do what it was told: an unknown option, a value that cannot be used, a file or a
    peer that is not there. Nothing was done; standard error says what to write instead."""
    INTERRUPTED = 130
    """Ctrl-C (`router`, which goes on until then, has 0). By another signal: 128 and its number."""
