"""The command line itself: its answers to wrong input, and what it detects on a machine."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer
import uvicorn
from command_line import invoke, one_line

from kv_connector import __version__
from kv_connector.cli.common.exit_status import ExitStatus
from kv_connector.cli.main import app
from kv_connector.engine import ProviderStatus, transfer_engine
from kv_connector.lab import demonstration
from kv_connector.router.front.server import BoundedProtocol, ServerConfig

run = partial(invoke, app)


def test_help_names_the_commands() -> None:
    status, output = run("--help")
    assert status == 0
    for command in ("bench", "config", "demo", "doctor", "router", "topology", "verify"):
        assert command in output


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("verify", "a prompt with two answers is not counted"),
        ("weights plan", "`seed` and `verify` do not work until the next push"),
    ],
)
def test_help_wraps_paragraphs_at_the_width_of_the_terminal(command: str, words: str) -> None:
    _, output = run(*command.split(), "--help")
    assert any(words in line for line in output.splitlines()), output


_WITHOUT_ROUTER = """
import sys
for name in ("aiohttp", "httptools", "starlette", "uvicorn", "uvloop"):
    sys.modules[name] = None  # an import raises ImportError
from kv_connector.cli.main import app
app()
"""


@pytest.mark.parametrize(
    ("command", "status", "shown"),
    [
        (["--version"], 0, __version__),
        (["keygen", "--help"], 0, "keygen"),
        (["router", "--registration", "127.0.0.1:1"], 2, "kv-connector[router]"),
        (["verify", "http://127.0.0.1:1"], 2, "kv-connector[router]"),
    ],
)
def test_cli_needs_the_packages_of_the_router_only_for_its_commands(
    command: list[str], status: int, shown: str
) -> None:
    ran = subprocess.run([sys.executable, "-c", _WITHOUT_ROUTER, *command], capture_output=True, text=True)
    assert ran.returncode == status
    assert shown in "".join(one_line(ran.stdout + ran.stderr).split())


def test_version_is_printed_for_programs() -> None:
    assert run("--version") == (0, f"kv-connector {__version__}\n")


def test_the_router_refuses_a_wrong_address_and_shows_how_one_looks() -> None:
    status, output = run("router", "--prefill", "127.0.0.1:8100", "--decode", "http://127.0.0.1:8200")
    assert status == 2
    assert "http://host:port" in output


def test_router_ends_with_its_own_status_when_the_port_is_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        words = [sys.executable, "-m", "kv_connector.cli.main", "router", "--port", port]
        engines = ["--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2"]
        ended = subprocess.run([*words, *engines], capture_output=True, text=True, timeout=120)
    assert ended.returncode == ExitStatus.STARTUP, ended.stderr
    assert "address already in use" in ended.stderr


def test_the_router_needs_both_sides() -> None:
    status, output = run("router", "--prefill", "http://127.0.0.1:8100")
    assert status == 2
    assert "--decode" in output


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--ttft-ms", "400"], "belong together"),
        (["--tbt-ms", "15"], "belong together"),
        (["--ttft-ms", "400", "--tbt-ms", "0"], "more than 0"),
        (["--ttft-ms", "nan", "--tbt-ms", "15"], "more than 0"),
        (["--ttft-ms", "soon", "--tbt-ms", "15"], "--ttft-ms"),
        (["--ttft-ms", "400", "--tbt-ms", "15"], "engines that register"),
        (["--policy", "goodput"], "needs objectives"),
        (["--policy", "round_robin"], "--policy"),
        (
            [
                "--policy",
                "cache_aware",
                "--ttft-ms",
                "400",
                "--tbt-ms",
                "15",
                "--registration",
                "127.0.0.1:1",
            ],
            "does not use --ttft-ms",
        ),
    ],
)
def test_the_router_refuses_objectives_that_are_none(options: list[str], why: str) -> None:
    engines = ["--prefill", "http://127.0.0.1:8100", "--decode", "http://127.0.0.1:8200"]
    status, output = run("router", *engines, *options)
    assert status == 2
    assert why in one_line(output)


@pytest.mark.parametrize("missing", ["uvloop", "httptools"])
def test_router_runs_on_a_fast_loop_or_names_the_extra_to_install(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("router", "--prefill", "http://127.0.0.1:8100", "--decode", "http://127.0.0.1:8200")
    ran: list[ServerConfig] = []

    def started(server: uvicorn.Server) -> None:
        assert isinstance(server.config, ServerConfig)
        ran.append(server.config)
        server.started = True

    monkeypatch.setattr(uvicorn.Server, "run", started)
    assert run(*words)[0] == ExitStatus.SUCCESS
    (config,) = ran
    assert (config.loop, config.http) == ("uvloop", BoundedProtocol)
    # Longer than nginx and AWS's load balancer keep an idle connection: 60 s.
    assert config.timeout_keep_alive == 75
    assert config.timeout_graceful_shutdown == 600
    monkeypatch.setitem(sys.modules, missing, None)
    status, output = run(*words)
    assert status == ExitStatus.USAGE
    assert "pip install 'kv-connector[router]'" in one_line(output)


@pytest.mark.needs_vllm
@pytest.mark.parametrize(("lane", "why"), [("pigeon", "Choose one of"), ("nvlink", "not usable here: ")])
def test_the_demo_refuses_a_lane_before_it_starts_anything(
    lane: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = [ProviderStatus("tcp", True, ""), ProviderStatus("nvlink", False, "no CUDA driver")]
    monkeypatch.setattr(transfer_engine, "providers", lambda: status)
    monkeypatch.setattr(demonstration, "demonstrate", lambda *_: pytest.fail("it has begun"))
    code, output = run("demo", "--provider", lane)
    assert code == 2
    assert lane in output
    assert why in output


# --- Behaviour that every command shares


def commands(group: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yields the words of every command and subcommand."""
    for name, command in (group or typer.main.get_group(app)).commands.items():
        yield (*path, name)
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))


@pytest.mark.parametrize("words", list(commands()), ids=" ".join)
def test_an_unknown_option_is_wrong_usage(words: tuple[str, ...]) -> None:
    status, output = run(*words, "--no-such-option")
    assert status == ExitStatus.USAGE
    assert "No such option: --no-such-option" in output


@pytest.mark.parametrize("words", [("doctor",), ("topology",)], ids=" ".join)
def test_findings_of_a_command_are_one_json_object(words: tuple[str, ...]) -> None:
    status, output = run(*words, "--json")
    assert status == ExitStatus.SUCCESS
    assert isinstance(json.loads(output), dict)


def test_doctor_json_reports_a_machine_without_a_usable_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_engine, "providers", lambda: [])
    status, output = run("doctor", "--json")
    assert status == ExitStatus.FAILURE
    found = {finding["subject"]: finding for finding in json.loads(output)["findings"]}
    assert found["lanes"] == {
        "subject": "lanes",
        "verdict": "FAIL",
        "words": "no lane is usable: no engine can start here",
    }


def kv_connector(*words: str | Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "kv_connector.cli.main", *map(str, words)],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_records_may_have_standard_output_to_themselves() -> None:
    output, errors = kv_connector("bench", "micro", "--iterations", "1000", "--json", "-").communicate()
    lines = [json.loads(line) for line in output.splitlines()]
    assert lines[0]["type"] == "conditions"
    assert len(lines) > 1
    assert "submit" in errors, "the table"


def test_interrupted_command_exits_with_its_own_status(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    process = kv_connector("config", "check", pipe)
    with pipe.open("w"):  # once the other end is open
        process.send_signal(signal.SIGINT)
        process.communicate()
    assert process.returncode == ExitStatus.INTERRUPTED


def test_a_shell_completes_commands() -> None:
    environment = {
        "_KV_CONNECTOR_COMPLETE": "complete_bash",
        "COMP_WORDS": "kv-connector ro",
        "COMP_CWORD": "1",
    }
    command = [str(Path(sys.executable).parent / "kv-connector")]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    assert re.findall(r"\S+", done.stdout) == ["router"]
