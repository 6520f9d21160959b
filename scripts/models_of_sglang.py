"""SGLang's model classes: the KV pools that SGLang makes for them, from its installed sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import sglang
from kv_classes import Sources
from models import Row

from kv_connector.sglang.refusals import REFUSED_POOLS, REFUSED_STATES

NAME = f"sglang-{version('sglang')}"

_MODELS = "sglang.srt.models"
_READ = (_MODELS, "sglang.srt.layers.radix", "sglang.srt.layers.attention.mamba")

# Pools with a test of tests/with_sglang, by its case.
TESTS = {"MHATokenToKVPool": "`page1`", "MLATokenToKVPool": "`mla`"}

# States of requests beside the pages. The test moves their rows between two managers, without a model.
_ROWS = "rows of such states without a model: `test_rooms_of_two_managers.py`"
_STATES = {"SWAKVPool": _ROWS, "HybridLinearKVPool": _ROWS, "DSATokenToKVPool": _ROWS}

# Classes whose layers their sources do not name.
_DELEGATING = {"LlavaForConditionalGeneration", "MindSporeForCausalLM", "Mistral3ForConditionalGeneration"}
_ENCODERS = {"PixtralVisionModel"}

# A state that some models of a pool have, by the pool: the refusal's key, and where it occurs.
_SOME = {"DSATokenToKVPool": "dsa_tail"}


def sglang_rows() -> list[Row]:
    """Returns a row for each class that SGLang's model registry imports."""
    root = Path(sglang.__file__).parents[1]
    sources = Sources(root, _READ)
    config = _Config(root / "sglang/srt/configs/model_config.py")
    found = []
    for file in sorted((root / "sglang/srt/models").rglob("*.py")):
        module = ".".join(file.relative_to(root).with_suffix("").parts)
        for name in _entry_classes(file):
            names = {
                one.name for each in sources.find(module, name) for one in (each, *sources.made_by(each))
            }
            found.append(_row(name, names, config))
    return found


def _entry_classes(file: Path) -> Iterator[str]:
    for node in ast.parse(file.read_text()).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="EntryClass")], value=ast.Name(id=name)):
                yield name
            case ast.Assign(targets=[ast.Name(id="EntryClass")], value=ast.List(elts=names)):
                yield from (one.id for one in names if isinstance(one, ast.Name))


class _Config:
    """The lists of architectures by which SGLang chooses a pool."""

    def __init__(self, file: Path) -> None:
        tree = ast.parse(file.read_text())
        functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        lists = {
            node.targets[0].id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }

        def named(function: str) -> set[str]:
            body = functions[function]
            used = [lists[one.id] for one in ast.walk(body) if isinstance(one, ast.Name) and one.id in lists]
            return {text for node in (body, *used) for text in _texts(node)}

        self.pooling = named("is_generation_model")
        self.encoder_decoder = named("is_encoder_decoder_model")
        self.v4 = named("is_deepseek_v4")
        self.dsa = named("is_deepseek_dsa")
        self.windows = named("is_hybrid_swa_model")
        self.minimax = named("is_minimax_sparse")
        self.qsa = named("is_qwen4_exp")
        self.latent = {
            text
            for node in ast.walk(functions["_derive_model_shapes"])
            if isinstance(node, ast.If) and "AttentionArch.MLA" in "".join(map(ast.unparse, node.body))
            for text in _texts(node.test)
        }

    def pools(self, name: str, names: set[str]) -> Iterator[str]:
        """Yields the pools of a class, which leads to these names. Several: the configuration decides."""
        if name in self.v4:
            yield "DeepSeekV4TokenToKVPool"
            return
        if name in self.qsa:
            yield "QSATokenToKVPool"
        elif "RadixLinearAttention" in names or any(one.startswith("MambaMixer") for one in names):
            yield "HybridLinearKVPool"
        if name in self.minimax:
            yield "MiniMaxSparseKVPool"
        if name in self.windows:
            yield "SWAKVPool"
        if name in self.latent:
            yield "MLATokenToKVPool"
            if name in self.dsa:
                yield "DSATokenToKVPool"
        elif not {name} & (self.windows | self.minimax) and "RadixAttention" in names:
            yield "MHATokenToKVPool"


def _texts(node: ast.AST) -> Iterator[str]:
    for one in ast.walk(node):
        if isinstance(one, ast.Constant) and isinstance(one.value, str):
            yield one.value


def _row(name: str, names: set[str], config: _Config) -> Row:
    if name in config.pooling:
        return Row(name, (), "no KV cache", "it generates no tokens")
    pools = tuple(sorted(set(config.pools(name, names))))
    if not pools:
        if name in _ENCODERS:
            return Row(name, (), "no KV cache", "an encoder alone")
        if name in _DELEGATING:
            return Row(
                name, ("its language model's",), "not run", "it makes the class that its config.json names"
            )
        return Row(name, (), "unknown", "no pool was found")
    wrong = [f"{pool}: {REFUSED_POOLS[pool]}" for pool in pools if pool in REFUSED_POOLS]
    if wrong:
        return Row(name, pools, "refused", "; ".join(wrong))
    notes = [
        f"refused with the state {_SOME[pool]}: {REFUSED_STATES[_SOME[pool]]}"
        for pool in pools
        if pool in _SOME
    ]
    if {*pools} <= {*TESTS}:
        return Row(name, pools, "supported", ", ".join(TESTS[pool] for pool in pools))
    missing = [pool for pool in pools if pool not in TESTS]
    notes += sorted({_STATES[pool] for pool in missing if pool in _STATES})
    return Row(name, pools, "not run", "; ".join([f"no test has {', '.join(missing)}", *notes]))
