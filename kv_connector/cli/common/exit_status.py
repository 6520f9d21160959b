"""The exit statuses, which all commands share."""

from enum import IntEnum


class ExitStatus(IntEnum):
    SUCCESS = 0
    """The command did its work, or its check passed."""
    FAILURE = 1
    """The result is negative, and the output names the cause.

    An engine cannot run here, a pair does not fit, a configuration is wrong, or an output differs. Or a
    measurement failed or missed its aim, or an engine is still busy.
    """
    USAGE = 2
    """The command line cannot be used: an unknown option, an unusable value, or a missing file or peer.

    The command did nothing, and standard error says what to change.
    """
    STARTUP = 3
    """`router` could not start, for example because an address is in use. Its log names the cause."""
    INTERRUPTED = 130
    """Ctrl-C ended the command (`router` ends with 0 then). Another signal: 128 plus its number."""
