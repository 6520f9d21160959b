"""Reads commands from shell scripts, compose files, manifests and files of environment variables."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from kv_connector.cli.config.deployment import STAND_IN, Command, PortScope, Unreadable

_ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_]\w*)=(?P<value>.*)", re.DOTALL)
_HERE = re.compile(r"<<-?\s*(['\"]?)(\w+)\1(.*\n)(?:.*\n)*?\s*\2$", re.MULTILINE)
# $((PORT + 1)) becomes ${PORT~+1}, a word without spaces or brackets. The value of $(command) is unknown.
_SUM = re.compile(r"\$\(\(\s*\$?(\w+)\s*([+-])\s*(\d+)\s*\)\)")
_SUBSTITUTION = re.compile(r"\$\([^()]*\)")
_VARIABLE = re.compile(r"\$(?:(\w+)|\((\w+)\)|\{(\w+)(?:~([+-]\d+)|:-([^}]*))?\})")
_BETWEEN_COMMANDS = ";&|()<>\n"


def shell_commands(where: str, text: str, known: Mapping[str, str]) -> Iterator[Command]:
    """Yields the commands of a shell script, each with the variables that are set for it.

    `known`: variables that were set before.
    """
    environment: dict[str, str] = {}
    for words in _split(where, text):
        mine = dict(environment)
        rest = list(words[1:] if words[0] == "export" else words)
        while rest and (assignment := _ASSIGNMENT.fullmatch(rest[0])):
            mine[assignment["name"]] = expand(assignment["value"], {**known, **mine})
            rest.pop(0)
        if rest:
            words = [expand(word, {**known, **mine}) for word in rest]
            yield Command(where, PortScope(where), tuple(words), mine)
        else:
            environment = mine
    yield Command(where, PortScope(where), (), environment)


def _split(where: str, text: str) -> Iterator[list[str]]:
    # A comment takes the end of its line with it, which ends a command. So line ends are doubled.
    joined = _HERE.sub(r"\3", text.replace("\\\n", " ")).replace("\n", "\n\n")
    joined = _SUBSTITUTION.sub("$SUBSTITUTION", _SUM.sub(r"${\1~\2\3}", joined))
    lexer = shlex.shlex(joined, posix=True, punctuation_chars=_BETWEEN_COMMANDS)
    lexer.whitespace = " \t\r"
    lexer.whitespace_split = True
    words: list[str] = []
    to_file = False
    try:
        for word in (*lexer, ";"):
            if not set(word) <= set(_BETWEEN_COMMANDS):
                words += [] if to_file else [word]
                to_file = False
            elif set(word) & set("<>"):
                to_file = True
                if words and words[-1].isdecimal():  # 2>log
                    words.pop()
            elif words:
                yield words
                words = []
    except ValueError as error:
        raise Unreadable(f"{where} is not a shell script: {error}") from None


def expand(word: str, known: Mapping[str, str]) -> str:
    """Replaces the known variables in a word; the others stay unchanged."""

    def value(found: re.Match[str]) -> str:
        plain, kubernetes, braced, summand, default = found.groups()
        text = known.get(plain or kubernetes or braced) or default
        if text is None or (summand and not text.isdecimal()):
            return found[0]
        return str(int(text) + int(summand)) if summand else text

    return _VARIABLE.sub(value, word)


def without_variables(word: str) -> tuple[str, list[str]]:
    """Returns the word with stand-ins for its unknown variables, and these variables."""
    return _VARIABLE.sub(STAND_IN, word), [found[0] for found in _VARIABLE.finditer(word)]


def environment_file(where: str, text: str) -> Command | None:
    """Reads a file of NAME=value lines like systemd and docker: quotes within a value belong to it."""
    environment: dict[str, str] = {}
    for line in filter(None, (line.strip() for line in text.splitlines())):
        if line.startswith("#"):
            continue
        assignment = _ASSIGNMENT.fullmatch(line)
        if assignment is None:
            return None
        value = assignment["value"].strip()
        quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
        environment[assignment["name"]] = value[1:-1] if quoted else value
    return Command(where, PortScope(where), (), environment) if environment else None


def containers(
    where: str, tree: Any, known: Mapping[str, str], path: str, owner: str = ""
) -> Iterator[Command]:
    """Yields the commands of every container (a mapping with `command` or `args`) in a compose file or
    manifest.

    `path`: the file and the tree's place in it, which differs for each service and each pod. `owner`: name of
    the object that contains the tree.
    """
    if isinstance(tree, list):
        one_pod = path.endswith(("/containers", "/initContainers"))
        for number, one in enumerate(tree):
            yield from containers(where, one, known, path if one_pod else f"{path}/{number}", owner)
    if not isinstance(tree, dict):
        return
    metadata = tree.get("metadata")
    owner = str(metadata.get("name", owner)) if isinstance(metadata, dict) else owner
    environment = {name: expand(value, known) for name, value in _environment(tree)}
    mine = {**known, **environment}
    words = [word for key in ("entrypoint", "command", "args") for word in _words(tree.get(key), mine)]
    if words:
        machine = PortScope(where) if tree.get("network_mode") == "host" else PortScope(path, container=True)
        name = str(tree.get("name") or path.rpartition("/")[2])
        if len(words) > 2 and words[1] == "-c":  # a shell with its script
            shell = shell_commands(where, words[2], mine)
            commands = [(one.words, {**environment, **one.environment}) for one in shell]
        else:
            commands = [(tuple(words), environment)]
        for command, variables in commands:
            yield Command(f"{where}: {' '.join(filter(None, (owner, name)))}", machine, command, variables)
        return
    for key, value in tree.items():
        yield from containers(where, value, known, f"{path}/{key}", owner)


def _words(command: Any, known: Mapping[str, str]) -> Sequence[str]:
    """Splits a command like docker compose: variables are replaced before words are split."""
    if isinstance(command, str):
        try:
            return shlex.split(expand(command, known))
        except ValueError as error:
            raise Unreadable(f"{command!r} is not a command: {error}") from None
    return [expand(str(word), known) for word in command] if isinstance(command, list) else []


def _environment(container: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    found = container.get("environment", container.get("env"))
    entries: Iterable[Any] = ()
    if isinstance(found, dict | list):
        entries = found.items() if isinstance(found, dict) else found
    for one in entries:
        if isinstance(one, dict):  # Kubernetes: a value, or its source
            name, value = one.get("name"), one.get("value")
        else:
            name, value = one if isinstance(one, tuple) else str(one).partition("=")[::2]
        if value is not None:
            yield str(name), str(value)
