"""The recipe for two hosts: its commands as they stand in README.md and docs/get-started/two-hosts.md, on
three hosts of this machine (network namespaces), with real engines on its CPUs over tcp.

`make test-examples`. integration/soft_roce/two_hosts is the same over verbs, in a VM.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from hosts import Host, NoHostsError, hosts

from kv_connector.lab.cluster import EngineSettings, engine_environment
from kv_connector.lab.model import make_llama
from kv_connector.lab.process import POLL_SECONDS, START_SECONDS

ROOT = Path(__file__).parents[2]
KEY = "/etc/kv-connector/key"
ADDRESSES = {"router": "10.0.0.9", "prefill": "10.0.0.1", "decode": "10.0.0.2"}
# vLLM takes nearly all memory of a host, and these hosts share that of one machine.
SMALL = (
    "--dtype float32 --enforce-eager --max-model-len 2048 --block-size 32 --kv-cache-memory-bytes 134217728"
)
ANSWER_SECONDS = 120


def readme() -> tuple[str, dict[str, str]]:
    """Returns the command that makes the key, and the command of each host."""
    section = (ROOT / "README.md").read_text().partition("\n## Two hosts\n")[2].partition("\n## ")[0]
    blocks = [block.strip() for block in re.findall(r"(?m)^(?: {4}.*\n)+", section)]
    keygen, *commands = [block for block in blocks if re.search(r"kv-connector |vllm ", block)]
    return keygen, dict(zip(("prefill", "decode", "router"), commands, strict=True))


class Page(NamedTuple):
    """The commands of docs/get-started/two-hosts.md for requests."""

    ready: str
    """Succeeds if the router has both engines."""
    request: str
    pushed: str
    """Reads the prefill engine's counters."""
    received: str
    """Reads the decode engine's counters."""


def page() -> Page:
    text = (ROOT / "docs/get-started/two-hosts.md").read_text()
    return Page(*re.findall(r"(?m)^ {4}(curl (?:.*\\\n)*.*)", text))


# Without engines, so that a change of the documents shows at once.
def test_documents_have_the_commands_of_the_recipe() -> None:
    keygen, commands = readme()
    assert "keygen" in keygen
    assert [commands[host].count(address) > 0 for host, address in ADDRESSES.items()] == [True, True, True]
    assert [("/health" in one, "/completions" in one, "/metrics" in one) for one in page()] == [
        (True, False, False),
        (False, True, False),
        (False, False, True),
        (False, False, True),
    ]


def on_cpus(command: str) -> str:
    """Returns the command with the changes that the page names for engines on CPUs."""
    if "vllm serve" not in command:
        return command
    command = command.replace('"providers": ["verbs"]', '"providers": ["tcp"]')
    server = "python -m vllm.entrypoints.openai.api_server --model"
    return f"{command.replace('vllm serve', server)} {SMALL}"


class Recipe:
    """The hosts, and a directory with the model that all of them see."""

    def __init__(self, directory: Path, made: dict[str, Host]) -> None:
        self.directory = directory
        self.hosts = made
        outside = {name: value for name, value in os.environ.items() if not name.startswith("KV_CONNECTOR_")}
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        engines = engine_environment(EngineSettings())
        self.environment = {**outside, **engines, "PATH": path, "KV_CONNECTOR_KEY_FILE": KEY}

    def run(self, host: str, line: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.hosts[host].command(line, self.directory),
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=ANSWER_SECONDS,
            check=False,
        )

    def output(self, host: str, line: str) -> str:
        done = self.run(host, line)
        assert done.returncode == 0, f"{line}\n{done.stdout}"
        return done.stdout

    def log(self, host: str) -> Path:
        return self.directory / f"{host}.log"

    @contextmanager
    def started(self, host: str, line: str) -> Iterator[subprocess.Popen[bytes]]:
        with self.log(host).open("wb") as log:
            process = subprocess.Popen(
                self.hosts[host].command(line, self.directory),
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            yield process
        finally:
            process.kill()  # processes that it has started end with their host
            process.wait()


@pytest.mark.skipif("KVC_EXAMPLES" not in os.environ, reason="starts engines: make test-examples")
def test_recipe_for_two_hosts_gives_the_answer_of_one_engine(tmp_path: Path) -> None:
    keygen, commands = readme()
    ready, request, pushed, received = page()
    make_llama(tmp_path / "MODEL")
    with ExitStack() as stack:
        try:
            recipe = Recipe(tmp_path, stack.enter_context(hosts(tmp_path, ADDRESSES)))
        except NoHostsError as error:
            pytest.skip(f"no namespaces here (root, iproute2 and util-linux are needed): {error}")
        recipe.output("prefill", keygen)
        for host in ("decode", "router"):
            recipe.output(host, f"mkdir -p {Path(KEY).parent}")
            shutil.copy2(recipe.hosts["prefill"].path(KEY), recipe.hosts[host].path(KEY))
        processes = {
            host: stack.enter_context(recipe.started(host, on_cpus(command)))
            for host, command in commands.items()
        }
        deadline = time.monotonic() + 3 * START_SECONDS  # the test took 299 s beside other suites
        while recipe.run("router", ready).returncode != 0:
            for host, process in processes.items():
                assert process.poll() is None, recipe.log(host).read_text()[-5000:]
            assert time.monotonic() < deadline, recipe.run("router", "curl -s http://10.0.0.9:8000/health")
            time.sleep(POLL_SECONDS)
        assert '"finish_reason":"length"' in recipe.output("router", request)

        body = json.dumps(
            {
                "model": "MODEL",
                "prompt": "Once upon a time there was a page that crossed a wire. " * 20,
                "max_tokens": 16,
                "temperature": 0,
            }
        )
        ask = f"curl -sS -H 'Content-Type: application/json' -d '{body}'"
        texts = [
            json.loads(recipe.output("router", f"{ask} http://{address}/v1/completions"))["choices"][0][
                "text"
            ]
            for address in ("10.0.0.9:8000", "10.0.0.1:8100")  # the prefill engine computes the second alone
        ]
        assert texts[0] == texts[1]
        # A page of 32 tokens has 32 KiB in each of 4 layers. The prompt of 1,100 characters has 35 blocks.
        numbers = dict(re.findall(r"^(\w+)\{.*\} (\S+)$", recipe.output("prefill", pushed), re.MULTILINE))
        assert float(numbers["kv_connector_bytes_pushed_total"]) > 34 * 4 * 32 * 1024
        assert 'lane="tcp"' in recipe.output("prefill", pushed)
        assert re.search(r"UP: decode peer \S+, lane tcp", recipe.log("prefill").read_text())
        # The two requests through the router. The prefill engine's own request transfers nothing.
        series = re.search(
            r'_count\{.*lane="tcp".*\} (\S+)$', recipe.output("decode", received), re.MULTILINE
        )
        assert series is not None
        assert float(series[1]) == 2
