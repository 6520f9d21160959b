"""Parts of the local cluster, with small processes instead of engines. tests/with_vllm uses real engines."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from kv_connector.lab.cluster import EngineProcess, LocalCluster
from kv_connector.lab.demonstration import DemonstrationRow, Pushed, _problems
from kv_connector.lab.free_ports import HIGHEST, LOWEST, STEP, free_ports
from kv_connector.lab.model import make_gemma3, make_llama
from kv_connector.lab.process import (
    Process,
    StartError,
    leave_on_signals,
    stop,
    wait_healthy,
)

PATIENCE = 60.0

Start = Callable[[str], Process]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """A function that starts a Python program as a Process named `child`."""
    started: list[Process] = []

    def start(program: str) -> Process:
        command = [sys.executable, "-c", textwrap.dedent(program)]
        process = Process("child", command, environment={"GREETING": "hello"}, log=tmp_path / "child.log")
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.01)


def has_members(process: Process, count: int) -> bool:
    return len(process.members()) == count


FAMILY = """
    import os, signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.{leader})
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); "
    child += "time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", child])
    time.sleep(600)
"""


@pytest.mark.parametrize("leader", ["SIG_DFL", "SIG_IGN"])
def test_stop_ends_children_too_even_those_that_ignore_it(
    start: Start, leader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_connector.lab.process.STOP_SECONDS", 0.2)
    process = start(FAMILY.format(leader=leader))
    until(lambda: "up" in process.log_tail())
    assert len(process.members()) == 2
    stop([process])
    assert process.members() == []
    assert not process.running()


def test_stop_interrupted_still_leaves_nothing(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = [start(FAMILY.format(leader="SIG_IGN")) for _ in range(2)]
    for process in processes:
        until(partial(has_members, process, 2))

    def interrupt(process: Process) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Process, "terminate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        stop(processes)
    assert [process.members() for process in processes] == [[], []]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_a_program_ends_its_group_even_if_it_ignores_signals(
    tmp_path: Path, number: signal.Signals
) -> None:
    """A busy engine ignores the SIGTERM that the kernel sends it when its parent is gone."""
    log = tmp_path / "child.log"
    family = textwrap.dedent(FAMILY.format(leader="SIG_IGN"))
    program = f"""
        import sys, time
        from pathlib import Path
        from kv_connector.lab import process
        process.STOP_SECONDS = 0.2
        with process.leave_on_signals(), process.ProcessGroup() as group:
            command = [sys.executable, "-c", {family!r}]
            child = process.Process("child", command, environment={{}}, log=Path({str(log)!r}))
            group._adopt(child, "")
            print(child.pid, flush=True)
            time.sleep(600)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        leader = int(parent.stdout.readline())
        try:
            until(lambda: "up" in log.read_text())
            parent.send_signal(number)
            assert parent.wait(PATIENCE) == 128 + number
            assert not alive(leader)
        finally:
            parent.kill()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(leader, signal.SIGKILL)


def test_a_signal_during_a_start_comes_after_the_process_is_adopted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_connector.lab.process.STOP_SECONDS", 0.2)
    started: list[int] = []

    class Signalled(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self.pid)
            signal.raise_signal(signal.SIGTERM)

    def program() -> None:
        with leave_on_signals(), LocalCluster(tmp_path, tmp_path) as cluster:
            cluster.interpreter = ("sh", "-c", "trap '' TERM; sleep 600")
            cluster.start_engine("engine")

    monkeypatch.setattr("kv_connector.lab.process.subprocess.Popen", Signalled)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit, match="143"):
        program()
    (pid,) = started
    assert not alive(pid)
    assert signal.getsignal(signal.SIGTERM) is before


def orphan(log: Path, environment: Mapping[str, str] | None = None) -> int:
    """Returns the process id of a child whose parent was killed right after the start."""
    program = f"""
        import sys, time
        from pathlib import Path
        from kv_connector.lab.process import Process
        command = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
        child = Process("child", command, environment={{}}, log=Path({str(log)!r}))
        print(child.pid, flush=True)
        time.sleep(600)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    return child


def test_a_process_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    """The child ends even if the parent is killed and can run no code."""
    child = orphan(tmp_path / "child.log")
    until(lambda: not alive(child))


def test_a_process_does_not_start_when_its_parent_is_gone(tmp_path: Path) -> None:
    """The parent ends before the child has requested a signal at the parent's end."""
    log, gate, shim = tmp_path / "child.log", tmp_path / "gate", tmp_path / "setpriv"
    os.mkfifo(gate)
    shim.write_text(f'#!/bin/sh\nread -r go <{gate}\nexec {shutil.which("setpriv")} "$@"\n')
    shim.chmod(0o755)
    child = orphan(log, {"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert alive(child)
    gate.write_text("go\n")
    until(lambda: not alive(child))
    assert log.read_text() == ""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_early_death_of_a_process_is_reported_with_the_end_of_its_log(start: Start) -> None:
    process = start("import os; print(os.environ['GREETING'], 'from the log'); raise SystemExit(3)")
    with pytest.raises(StartError, match=r"(?s)child ended with status 3 .*hello from the log"):
        wait_healthy({process: "http://127.0.0.1:1/health"}, deadline=time.monotonic() + PATIENCE)


def test_process_that_is_never_ready_is_reported_at_the_deadline(start: Start) -> None:
    process = start("import time; time.sleep(600)")
    with pytest.raises(StartError, match="child was not ready in time"):
        wait_healthy({process: "http://127.0.0.1:1/health"}, deadline=time.monotonic())


def test_death_of_a_process_is_reported_while_another_is_awaited(start: Start) -> None:
    slow = start("import time; time.sleep(600)")
    dead = start("raise SystemExit(3)")
    url = "http://127.0.0.1:1/health"
    with pytest.raises(StartError, match="child ended with status 3"):
        wait_healthy({slow: url, dead: url}, deadline=time.monotonic() + PATIENCE)


def test_a_process_is_healthy_once_its_url_answers_200(start: Start) -> None:
    (port,) = free_ports(1)
    server = "http.server.SimpleHTTPRequestHandler"
    process = start(f"import http.server; http.server.test({server}, port={port}, bind='127.0.0.1')")
    wait_healthy({process: f"http://127.0.0.1:{port}/"}, deadline=time.monotonic() + PATIENCE)
    assert process.running()


def test_an_engine_starts_again_as_it_was_at_its_port_with_its_log(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    program = f"""
        import http.server, os
        print(os.environ["GREETING"], flush=True)
        http.server.test(http.server.SimpleHTTPRequestHandler, port={port}, bind="127.0.0.1")
    """
    first = EngineProcess(
        "child",
        [sys.executable, "-c", textwrap.dedent(program)],
        environment={"GREETING": "hello"},
        log=tmp_path / "child.log",
        port=port,
        control_port=5,
    )
    with LocalCluster(tmp_path, tmp_path) as cluster:
        try:
            wait_healthy({first: f"{first.url}/"}, deadline=time.monotonic() + PATIENCE)
        finally:
            again = cluster.restart(first)
        assert first.members() == []
        assert (again.name, again.endpoint) == (first.name, first.endpoint)
        wait_healthy({again: f"{again.url}/"}, deadline=time.monotonic() + PATIENCE)
        assert again.pid != first.pid
        assert again.log_tail().count("hello") == 2
    assert again.members() == []


def test_a_signal_reaches_the_whole_group(start: Start) -> None:
    process = start(FAMILY.format(leader="SIG_IGN"))
    until(lambda: len(process.members()) == 2)
    process.signal(signal.SIGKILL)
    until(lambda: process.members() == [])


@pytest.mark.parametrize("behind", [0, STEP - 1])
def test_ports_are_free(behind: int) -> None:
    """The ports behind the first port are free too: the other ranks listen there."""
    (port,) = free_ports(1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port + behind))
        taken.listen()
        once_around = {free_ports(1)[0] for _ in range((HIGHEST - LOWEST) // STEP)}
        assert port not in once_around


def test_unbound_port_is_not_given_out_again() -> None:
    calls = [free_ports(500) for _ in range(4)]
    assert len({port for ports in calls for port in ports}) == 2000


@pytest.mark.parametrize("make", [make_llama, make_gemma3])
def test_a_model_is_the_same_bytes_each_time_and_others_with_another_seed(
    make: Callable[..., Path], tmp_path: Path
) -> None:
    first, again, other = (
        (make(tmp_path / name, layers=3, seed=seed) / "model.safetensors").read_bytes()
        for name, seed in (("first", 1), ("again", 1), ("other", 2))
    )
    assert first == again
    assert first != other


def test_gemma3_has_windows_between_full_layers(tmp_path: Path) -> None:
    config = json.loads((make_gemma3(tmp_path, layers=4, full_attention_every=2) / "config.json").read_text())
    assert config["layer_types"] == ["sliding_attention", "full_attention"] * 2


def test_heads_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"heads \(4\) must be a multiple of kv_heads \(3\)"):
        make_llama(tmp_path, heads=4, kv_heads=3)


def test_a_prompt_of_n_characters_is_n_tokens_and_comes_back(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(make_llama(tmp_path, layers=1) / "tokenizer.json"))
    text = "Once upon a time,\n there  was: 42!"
    tokens = tokenizer.encode(text).ids
    assert len(tokens) == len(text)
    assert tokenizer.decode(tokens) == text


PAGES = 96


def row(*, pages: float, equal: bool = True) -> DemonstrationRow:
    return DemonstrationRow(33, 0.1, 0.1, equal, Pushed(pages, pages, 0, 1, 0), "host", PAGES)


def test_the_demo_fails_on_a_different_output_and_on_pages_that_did_not_come() -> None:
    assert list(_problems(row(pages=PAGES))) == []
    assert len(list(_problems(row(pages=PAGES, equal=False)))) == 1
    assert len(list(_problems(row(pages=0)))) == 1
    assert len(list(_problems(row(pages=PAGES - 1)))) == 1
