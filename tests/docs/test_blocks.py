"""Runs the code in documents as it stands there.

All Python blocks of a page run in order, with the names that earlier blocks define. Shell blocks run if a
comment marks them, in a directory with the models that they name. Their output must be the one that the
document shows:

    <!-- run -->
    <!-- output -->
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
}
PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)
# A comment, an empty line or none, and a block, which is fenced or indented.
MARKED = re.compile(r"<!-- (run|output) -->\n\n?(?:```\w*\n((?s:.*?))```|((?:(?: {4}.*)?\n)+))")
MODELS = {
    "Llama-3.1-8B": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
    }
}


def having(pattern: re.Pattern[str]) -> list[str]:
    found = [name for name, text in DOCUMENTS.items() if pattern.search(text)]
    assert found
    return found


@pytest.mark.parametrize("name", having(PYTHON))
def test_python_blocks_run(name: str) -> None:
    names: dict[str, object] = {}
    for block in PYTHON.finditer(DOCUMENTS[name]):
        line = DOCUMENTS[name].count("\n", 0, block.start(1))
        exec(compile("\n" * line + block[1], ROOT / name, "exec"), names)


@pytest.mark.parametrize("name", having(MARKED))
def test_shell_blocks_run_and_print_the_shown_output(name: str, tmp_path: Path) -> None:
    for model, config in MODELS.items():
        (tmp_path / model).mkdir()
        (tmp_path / model / "config.json").write_text(json.dumps(config))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KV_CONNECTOR_")}
    said = ""
    for kind, fenced, indented in MARKED.findall(DOCUMENTS[name]):
        block = fenced or textwrap.dedent(indented)
        if kind == "output":
            assert _lines(said) == _lines(block)
            continue
        done = subprocess.run(
            ["bash", "-c", block],
            cwd=tmp_path,
            env={**environment, "PATH": path, "TERM": "dumb"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        said = done.stdout
        assert done.returncode < 2, f"{block}\n{said}"


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
