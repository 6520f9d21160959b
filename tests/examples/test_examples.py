"""examples/: each page's statements are true, and its command does what the page says.

`make test-examples` runs the examples that need engines, with their commands as a reader would run them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kv_connector.lab.free_ports import free_ports
from kv_connector.lab.process import STOP_SECONDS

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NAMES = sorted(path.name for path in EXAMPLES.iterdir() if path.is_dir())
PAGE_LINES = 60
# Twice the longest time: failure takes 320 s of two cores, as engines start beside three that answer.
COMMAND_SECONDS = 640
# An example ends its engines within STOP_SECONDS. The rest is for a busy machine.
END_SECONDS = 6 * STOP_SECONDS


def command(name: str) -> str:
    """Returns the command that the page gives its reader: the first indented block."""
    page = (EXAMPLES / name / "README.md").read_text()
    first = re.search(r"^    (\S.*(?:\\\n.*)*)", page, re.MULTILINE)
    assert first, f"{name} has no command"
    return re.sub(r"\s*\\\n\s*", " ", first[1])


def run(line: str, **environment: str) -> str:
    """Runs a page's command in the checkout's active environment and returns its output. The command must
    succeed."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with subprocess.Popen(
        shlex.split(line),
        cwd=ROOT,
        env={**os.environ, "PATH": path, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as started:
        try:
            output, _ = started.communicate(timeout=COMMAND_SECONDS)
        except subprocess.TimeoutExpired:
            started.terminate()  # so that it ends its engines
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.communicate(timeout=END_SECONDS)
            raise
        finally:
            started.kill()
    assert started.returncode == 0, output
    return output


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_one_page_with_one_command_which_the_list_has_too(name: str) -> None:
    page = (EXAMPLES / name / "README.md").read_text()
    assert len(page.splitlines()) <= PAGE_LINES
    (row,) = [line for line in (EXAMPLES / "README.md").read_text().splitlines() if f"({name}/)" in line]
    assert f"`{command(name)}`" in row


@pytest.mark.parametrize("lane", ["host", "tcp"])
def test_engine(lane: str) -> None:
    output = run(f"{command('engine')} --lane {lane}")
    assert f"over {lane}, right=True" in output


# --- With engines, as a reader would


def check_membership(output: str) -> None:
    joined = {line.partition(":")[0]: line.count("ready") for line in output.splitlines() if " have " in line}
    assert joined == {
        "two engines have joined": 2,
        "two more have joined": 4,
        "the first two have been drained and stopped": 2,
    }
    assert "silent" not in output, "a stopped engine leaves its routers"
    assert re.search(r"^\d\d+ requests answered, 0 failed$", output, re.MULTILINE), output


def check_metrics(output: str) -> None:
    values: dict[str, float] = {}
    for paragraph in output.strip().split("\n\n"):
        question, *told = paragraph.splitlines()
        name = re.search(r": (kv_connector_\w+), at the", question)
        assert name, output
        values[name[1]] = sum(float(line.split()[0].replace(",", "")) for line in told)
    empty = {name for name, value in values.items() if not value}
    assert empty <= {"kv_connector_transfers_under_way", "kv_connector_router_retries_total"}, output
    pushed, early = (values[f"kv_connector_bytes_pushed{when}_total"] for when in ("", "_before_prefill_end"))
    assert 0 < early < pushed
    assert values["kv_connector_router_requests_total"] == values["kv_connector_transfers_total"] == 4


def check_conversation(output: str) -> None:
    turns = [list(map(int, line.split()[:5])) for line in output.splitlines() if re.match(r" *\d+ ", line)]
    assert [turn for turn, *_ in turns] == [*range(1, 11)], output
    assert all(prompt == own + loaded + computed for _, prompt, own, loaded, computed in turns), output
    assert len(re.findall(r"^ +prefill-\d is killed$", output, re.MULTILINE)) == 1, output
    _, prompt, own, loaded, _ = turns[5]  # at the second prefill engine
    assert own == 0, output
    # The decode engine has all but the last question, and blocks have 32 tokens.
    assert prompt - 200 - 32 <= loaded < prompt - 200, output


def example(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(file).stem, EXAMPLES / file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rl_rewards_what_stands_in_order() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    learn = example("rl/learn.py")
    learn.GROUP = 2  # type: ignore[attr-defined]
    prompts = torch.tensor([[3, 1, 2, 1, learn.EQUALS]] * 2 + [[0, 9, 9, 0, learn.EQUALS]] * 2)
    answers = torch.tensor([[1, 1, 2, 3], [1, 2, 3, 9], [9, 0, 9, 0], [0, 0, 9, 10]])
    rewards = learn.rewards(learn.Samples(prompts, answers, torch.zeros(4, 4)))
    assert rewards.tolist() == [[1, 1, 1, 1], [1, 0, 0, 0], [0, 1, 1, 0], [1, 1, 1, 0]]
    # A token that all answers to a prompt have right, or all have wrong, teaches nothing.
    half = [0, 0.5, 0.5, 0.5], [0, -0.5, -0.5, -0.5], [-0.5, 0, 0, 0], [0.5, 0, 0, 0]
    assert learn.advantages(rewards).tolist() == list(half)


reader = pytest.mark.skipif("KVC_EXAMPLES" not in os.environ, reason="takes minutes: make test-examples")


@reader
def test_command_of_vllm() -> None:
    prefill, decode, router = (str(port) for port in free_ports(3))
    output = run(command("vllm"), PREFILL_PORT=prefill, DECODE_PORT=decode, ROUTER_PORT=router)
    assert '"finish_reason":"length"' in output
    (pushed,) = re.findall(r"^kv_connector_pages_pushed_total\{.*\} (\S+)$", output, re.MULTILINE)
    assert float(pushed) == 4  # a page for each layer


def check_failure(output: str) -> None:
    told = dict(re.findall(r"^(\S+) killed: .* (\d) of 4 clients saw a failure", output, re.MULTILINE))
    assert told.keys() == {"prefill-1", "decode-1"}, output
    assert told["prefill-1"] == "0", output
    assert output.count("started again: joined") == 2, output
    (failed,) = re.findall(r"^\d+ requests answered, (\d+) failed$", output, re.MULTILINE)
    assert failed == told["decode-1"], output
    assert "another answer" not in output


@reader
@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("membership", check_membership),
        ("failure", check_failure),
        ("conversation", check_conversation),
        ("metrics", check_metrics),
    ],
)
def test_command(name: str, check: object) -> None:
    assert callable(check)
    check(run(command(name)))


@reader
@pytest.mark.skipif(
    not (ROOT / ".venv-sglang" / "ready").exists(), reason="no SGLang: make .venv-sglang/ready"
)
def test_command_of_sglang() -> None:
    alone, both = run(command("sglang")).strip().splitlines()[-2:]
    assert alone.partition("[")[2] == both.partition("[")[2] != ""


@reader
def test_command_of_rl(tmp_path: Path) -> None:
    picture = tmp_path / "rl.svg"
    output = run(f"{command('rl')} {picture}")
    lines = [line.split() for line in output.splitlines() if re.match(r" *\d+ ", line)]
    assert [int(line[0]) for line in lines] == [1, *range(10, 121, 10)], output
    before, after = float(lines[0][1]), float(lines[-1][1])
    assert before < 0.2, output
    assert after > 0.8, output
    assert max(float(line[4]) for line in lines) < 1e-4, output
    assert "Reward" in picture.read_text()


@reader
def test_command_of_rl_refuses_what_it_cannot_draw() -> None:
    with pytest.raises(AssertionError, match=r"rl\.png: pictures are SVG"):
        run(f"{command('rl')} rl.png")
