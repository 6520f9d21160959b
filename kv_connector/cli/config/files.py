"""Converts files to engines and routers. A file's kind is recognised by its contents."""

from __future__ import annotations

import difflib
import json
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import yaml

from kv_connector.agent.settings import (
    SETTINGS,
    SETTINGS_VARIABLE,
    SettingsError,
    nearest,
    settings_in_environment,
)
from kv_connector.cli.config.deployment import (
    Command,
    ConfiguredEngine,
    PortScope,
    Role,
    Router,
    Unknown,
    Unreadable,
)
from kv_connector.cli.config.start_commands import (
    containers,
    environment_file,
    shell_commands,
    without_variables,
)

CONNECTOR = "WriteImmConnector"
BACKEND = "write_imm"

TRANSFER_KEYS = (
    "kv_connector",
    "engine_id",
    "kv_buffer_device",
    "kv_role",
    "kv_port",
    "kv_connector_extra_config",
    "kv_connector_module_path",
    "enable_permute_local_kv",
    "kv_load_failure_policy",
)
"""Fields of vLLM's --kv-transfer-config."""
ROUTER_KEYS = ("prefill", "decode", "registration")
"""Options of the router, of which each of its configuration files has at least one."""
# A misspelt word, such as `prefil` or `registraton`. vLLM has no option that is as close to one of them.
_SAME_WORD = 0.8
POLICIES = ("fail", "recompute")
ROLES: dict[str, Role] = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}
MODES: dict[str, Role] = {"prefill": "prefill", "decode": "decode"}

_PROGRAMS: dict[tuple[str, ...], Literal["vLLM", "SGLang", "router"]] = {
    ("vllm", "serve"): "vLLM",
    ("vllm.entrypoints.openai.api_server",): "vLLM",
    ("sglang", "serve"): "SGLang",
    ("sglang.launch_server",): "SGLang",
    ("kv-connector", "router"): "router",
}
_SHORT = {
    "tp": "tensor-parallel-size",
    "pp": "pipeline-parallel-size",
    "dp": "data-parallel-size",
    "tp-size": "tensor-parallel-size",
    "pp-size": "pipeline-parallel-size",
    "dp-size": "data-parallel-size",
    "model-path": "model",
}


Part = ConfiguredEngine | Router | Unknown


def variables(where: str, text: str) -> Command | None:
    """Returns the file's variables if it contains nothing else."""
    found = environment_file(where, text)
    if found is None or any(_program(tuple(value.split()))[0] for value in found.environment.values()):
        return None
    return found


def read(where: str, text: str, known: Mapping[str, str]) -> list[Part]:
    """Returns what the file starts, or the settings that it contains.

    `known`: variables that are set where the file is read. Raises Unreadable if the file has no part of
    kv-connector. A file of variables alone need not have any.
    """
    if where.endswith((".yaml", ".yml")):
        try:
            found = list(_structured(where, documents(text), known))
        except yaml.YAMLError as error:
            raise Unreadable(f"{where} is not YAML: {' '.join(str(error).split())}") from None
        except RecursionError:
            raise Unreadable(f"{where} is nested too deeply") from None
    elif text.lstrip().startswith("{") or where.endswith(".json"):
        try:
            found = list(_structured(where, [json.loads(text)], known))
        except ValueError as error:
            raise Unreadable(f"{where} is not JSON: {error}") from None
        except RecursionError:
            raise Unreadable(f"{where} is nested too deeply") from None
    elif (command := variables(where, text)) is not None:
        return list(_started([command]))
    else:
        found = list(_started(shell_commands(where, text, known)))
    if not found:
        raise Unreadable(
            f"{where} has no engine, router or settings of kv-connector. Give the JSON or YAML of "
            "--kv-transfer-config, a vLLM config file, the router's configuration file, or a file of "
            "environment variables. Or give a shell script, compose file or manifest that starts vLLM, "
            "SGLang or our router"
        )
    return found


# A manifest of a whole cluster has some 10,000 nodes.
_MOST_NODES = 1_000_000


def documents(text: str) -> list[Any]:
    """Returns the documents of a YAML text. YAMLError: a text or value cannot be read, or aliases
    expand to more nodes than can be walked."""
    loader = yaml.SafeLoader(text)
    documents = []
    try:
        while loader.check_node():
            node = loader.get_node()
            # Counted before objects are constructed, because construction copies what `<<` merges.
            if _nodes(node, {}) > _MOST_NODES:
                raise yaml.YAMLError(f"its aliases expand to more than {_MOST_NODES} nodes")
            documents.append(loader.construct_document(node))
    except ValueError as error:  # an impossible date, for example
        raise yaml.YAMLError(str(error)) from None
    finally:
        loader.dispose()
    return documents


def _nodes(node: yaml.Node, counts: dict[yaml.Node, int]) -> int:
    """Returns the number of nodes to which a node expands. An alias is the node that it names.

    ``counts``: results for the nodes that were counted before.
    """
    if node in counts:
        return counts[node]
    counts[node] = _MOST_NODES + 1  # for a node within itself, which has no end
    match node:
        case yaml.SequenceNode():
            inside = list(node.value)
        case yaml.MappingNode():
            inside = [one for pair in node.value for one in pair]
        case _:
            inside = []
    counts[node] = 1 + sum(_nodes(one, counts) for one in inside)
    return counts[node]


def _structured(where: str, documents: Iterable[Any], known: Mapping[str, str]) -> Iterator[Part]:
    for number, document in enumerate(documents):
        if not isinstance(document, dict):
            continue
        options = {str(key).replace("_", "-"): value for key, value in document.items()}
        if "kv-transfer-config" in options:
            yield _vllm(where, PortScope(where), {key: _option(value) for key, value in options.items()}, {})
        elif any(str(key).startswith("kv_") for key in document):
            yield _transfer(where, PortScope(where), document, None, {})
        elif any(isinstance(document.get(key), str | list) for key in ROUTER_KEYS):
            yield Router(f"{where}: router", PortScope(where), (), {}, document)
        elif started := list(_started(containers(where, document, known, f"{where}/{number}"))):
            yield from started
        elif document.keys() & set(SETTINGS):
            yield ConfiguredEngine(where, PortScope(where), None, None, document)
        elif any(difflib.get_close_matches(key, ROUTER_KEYS, 1, _SAME_WORD) for key in options):
            yield Router(f"{where}: router", PortScope(where), (), {}, document)


def _option(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list | bool) else str(value)


def _started(commands: Iterable[Command]) -> Iterator[Part]:
    """Yields what the commands start. For variables alone, yields the settings that they contain."""
    engines = 0
    for command in commands:
        program, arguments = _program(command.words)
        options = options_of(arguments)
        if program == "router":
            where = _called(command, "router")
            if unknown := [word for word in arguments if "$" in word]:
                yield Unknown(where, f"not checked: {' '.join(unknown)} is not set here")
            else:
                yield Router(where, command.machine, arguments, command.environment)
        elif program == "vLLM" and "kv-transfer-config" in options:
            where = _called(command, f"vLLM {options.get('port', '')}")
            given = options["kv-transfer-config"]
            transfer = yield from _with_stand_ins(where, "--kv-transfer-config", given)
            if transfer is not None:
                options = {**options, "kv-transfer-config": transfer}
                yield _vllm(where, command.machine, options, command.environment)
        elif program == "SGLang" and "disaggregation-mode" in options:
            given = command.environment.get(SETTINGS_VARIABLE, "")
            settings = yield from _with_stand_ins(command.where, SETTINGS_VARIABLE, given)
            if settings is not None:
                environment = {**command.environment, SETTINGS_VARIABLE: settings}
                yield _sglang(replace(command, environment=environment), options)
        elif not command.words and not engines and SETTINGS_VARIABLE in command.environment:
            yield _sglang(command, None)
        engines += program is not None


def _with_stand_ins(where: str, name: str, text: str) -> Generator[Unknown, None, str | None]:
    """Returns the JSON in `text`, with stand-ins; None if it is no JSON without the unknown variables."""
    text, variables = without_variables(text)
    if not variables:
        return text
    words = f"{' '.join(variables)} in {name} is not set here"
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        yield Unknown(where, f"not checked: {words}")
        return None
    yield Unknown(where, words)
    return text


def _called(command: Command, name: str) -> str:
    """Returns the name of one of a script's commands."""
    return command.where if command.machine.container else f"{command.where}: {name.strip()}"


def _program(words: tuple[str, ...]) -> tuple[str | None, tuple[str, ...]]:
    """Returns the known program that a command starts, behind any prefix, and its arguments."""
    for at in range(len(words)):
        for names, program in _PROGRAMS.items():
            if (words[at].rpartition("/")[2], *words[at + 1 : at + len(names)]) == names:
                return program, words[at + len(names) :]
    if "--kv-transfer-config" in words:  # a container whose image contains the rest
        return "vLLM", words
    return None, ()


def options_of(words: Sequence[str]) -> dict[str, str]:
    """Returns `--name value`, `--name=value` and `-tp 2` by long name.

    A word without an option is the model.
    """
    found: dict[str, str] = {}
    at = 0
    while at < len(words):
        word, at = words[at], at + 1
        if not word.startswith("-"):
            found.setdefault("model", word)
            continue
        name, equals, value = word.lstrip("-").partition("=")
        if not equals and at < len(words) and not words[at].startswith("-"):
            value, at = words[at], at + 1
        name = name.replace("_", "-")
        found[_SHORT.get(name, name)] = value
    return found


def _vllm(
    where: str, machine: PortScope, options: Mapping[str, str], environment: Mapping[str, str]
) -> ConfiguredEngine:
    options = {_SHORT.get(name, name): value for name, value in options.items()}
    try:
        transfer = json.loads(options["kv-transfer-config"])
        if not isinstance(transfer, dict):
            raise ValueError("it must be a JSON object")
    except (ValueError, RecursionError) as error:
        problem = f"--kv-transfer-config: {error} in {options['kv-transfer-config'][:500]!r}"
        return ConfiguredEngine(where, machine, "vLLM", None, {}, options, environment, (problem,))
    return _transfer(where, machine, transfer, options, environment)


def _transfer(
    where: str,
    machine: PortScope,
    transfer: Mapping[str, Any],
    options: Mapping[str, str] | None,
    environment: Mapping[str, str],
) -> ConfiguredEngine:
    problems = []
    for key in transfer.keys() - set(TRANSFER_KEYS):
        if key in SETTINGS:
            problems.append(f"{key} is a setting of kv_connector_extra_config. Move it there")
        else:
            problems.append(f"unknown field `{key}`{nearest(str(key), TRANSFER_KEYS)}")
    ours = _ours(transfer)
    if ours is None:
        problems.append(
            f"kv_connector is {transfer.get('kv_connector')!r}. Set {CONNECTOR!r}"
            + (", among the connectors of MultiConnector" if _is_multi(transfer) else "")
        )
    settings = (ours or ({} if _is_multi(transfer) else transfer)).get("kv_connector_extra_config", {})
    if not isinstance(settings, dict):
        problems.append("kv_connector_extra_config must be an object")
        settings = {}
    role = str(transfer.get("kv_role"))
    if role not in ROLES:
        problems.append(
            f"kv_role is {transfer.get('kv_role')!r}. Set kv_producer (prefill), kv_consumer "
            "(decode) or kv_both"
        )
    policy = transfer.get("kv_load_failure_policy", POLICIES[0])
    if policy not in POLICIES:
        problems.append(f"kv_load_failure_policy is {policy!r}. Set {' or '.join(POLICIES)}")
    return ConfiguredEngine(
        where, machine, "vLLM", ROLES.get(role), settings, options, environment, tuple(sorted(problems))
    )


def _is_multi(transfer: Mapping[str, Any]) -> bool:
    return transfer.get("kv_connector") == "MultiConnector"


def _ours(transfer: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns our connector's part, which may be one of several connectors."""
    parts = [transfer]
    if _is_multi(transfer):
        extra = transfer.get("kv_connector_extra_config")
        connectors = extra.get("connectors") if isinstance(extra, dict) else None
        parts = connectors if isinstance(connectors, list) else []
    return next(
        (one for one in parts if isinstance(one, dict) and one.get("kv_connector") == CONNECTOR), None
    )


def _sglang(command: Command, options: Mapping[str, str] | None) -> ConfiguredEngine:
    problems = []
    try:
        settings = settings_in_environment(command.environment)
    except SettingsError as error:
        settings = settings_in_environment({})
        problems.append(str(error))
    mode = (options or {}).get("disaggregation-mode")
    if mode is not None and mode not in MODES:
        problems.append(f"--disaggregation-mode is {mode!r}. Set prefill or decode")
    backend = (options or {}).get("disaggregation-transfer-backend")
    if options is not None and backend != BACKEND:
        problems.append(f"--disaggregation-transfer-backend is {backend!r}. Set {BACKEND}")
    port = (options or {}).get("port", "")
    return ConfiguredEngine(
        command.where if options is None else _called(command, f"SGLang {port}"),
        command.machine,
        "SGLang",
        MODES.get(mode or ""),
        settings,
        options,
        command.environment,
        tuple(problems),
    )
