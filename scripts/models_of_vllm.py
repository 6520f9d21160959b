"""vLLM's model classes: the KV cache specs of their layers, from the sources of the installed release."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
import vllm
from kv_classes import Definition, Sources
from models import Row
from vllm.model_executor.models import registry
from vllm.v1 import kv_cache_interface

from kv_connector.vllm.model.kv_specs import spec_problem

NAME = "vllm-" + ".".join(vllm.__version__.split(".")[:2])

# The modules in which a model's layers are made.
_READ = (
    "vllm.model_executor.models",
    "vllm.models",
    *(
        f"vllm.model_executor.layers.{name}"
        for name in ("attention", "kda", "lightning_attn", "mamba", "mla")
    ),
    "vllm.v1.attention.backends.mla.sparse_swa",
)

# Layers with a test, by layer and spec: a case of tests/topologies that shows their pages.
TESTS = {
    ("Attention", "FullAttentionSpec"): "llama",
    ("Attention", "SlidingWindowSpec"): "gemma3",
    ("ChunkedLocalAttention", "ChunkedLocalAttentionSpec"): "llama4",
    ("MLAAttention", "MLAAttentionSpec"): "mla",
    ("MambaMixer2", "MambaSpec"): "granite",
    ("QwenGatedDeltaNetAttention", "MambaSpec"): "qwen3-next",
    ("ShortConv", "MambaSpec"): "lfm2",
}

# Model classes that a case runs. Their sources also name layers that other configurations make.
RUN = {
    "DeepSeekMTPModel": "mtp",
    "DeepseekV2ForCausalLM": "mla",
    "DeepseekV3ForCausalLM": "mtp",
    "Eagle3LlamaForCausalLM": "eagle3",
    "EagleLlamaForCausalLM": "eagle",
    "FalconH1ForCausalLM": "falcon-h1",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma4ForCausalLM": "gemma4",
    "GptOssForCausalLM": "gpt-oss",
    "GraniteMoeHybridForCausalLM": "granite",
    "Lfm2ForCausalLM": "lfm2",
    "Llama4ForCausalLM": "llama4",
    "LlamaForCausalLM": "llama",
    "Mamba2ForCausalLM": "mamba2",
    "MixtralForCausalLM": "mixtral",
    "NemotronHForCausalLM": "nemotron-h",
    "Qwen3NextForCausalLM": "qwen3-next",
}

# Model classes that a case of tests/gpu/families.py runs within its limits, by release.
GPU_RUN = {
    "vllm-0.33": {
        "DeepseekV32ForCausalLM": "DeepSeek-V3.2",
        "Glm5NextForCausalLM": "GLM-5-next",
        "JambaForCausalLM": "Jamba",
        "KimiLinearForCausalLM": "Kimi-Linear",
        "MambaForCausalLM": "Mamba",
        "OlmoHybridForCausalLM": "OLMo-hybrid",
        "Qwen4ExpForCausalLM": "Qwen4-Exp",
    }
}
# Model classes that ran outside of these limits, by release.
NOT_SHOWN = {
    "vllm-0.33": {
        "DeepseekV4ForCausalLM": "GPU `DeepSeek-V4`: answers to prompts of up to 700 tokens are those of one "
        "engine, and longer ones not always. One engine alone answers 2,100 tokens differently each time"
    }
}
# Layers that these classes alone have shown.
GPU_LAYERS = {
    "vllm-0.33": {
        "DeepseekV32Attention": "DeepSeek-V3.2",
        "DeepseekV32IndexerCache": "DeepSeek-V3.2",
        "Glm5NextIndexerCache": "GLM-5-next",
        "Glm5NextLinearAttention": "GLM-5-next",
        "Glm5NextTailCache": "GLM-5-next",
        "KimiK3DeltaAttention": "Kimi-Linear",
        "MambaMixer": "Mamba",
        "MultiHeadLatentAttention": "Kimi-Linear",
        "QSACompressedKeyCache": "Qwen4-Exp",
        "QSAKeyStateCache": "Qwen4-Exp",
        "Qwen4ExpPLELayer": "Qwen4-Exp",
        "Qwen4ExpQSAAttention": "Qwen4-Exp",
    }
}

# Layers that only a few configurations of the classes make whose sources name them.
_RARE = {"RSWAAttention", "WhisperCausalAttentionWithBlockPooling"}
# The decoder layer of DeepSeek-V2, which `mla` runs, makes an indexer only for a sparse model.
_SPARSE_ONLY = ("DeepseekV2DecoderLayer", "DeepseekV32IndexerCache")

# Whisper's attention, which encoders of other models use, names cross attention. Only its decoder makes it.
_ONLY_WITH = {"CrossAttention": ("WhisperAttention", "WhisperCrossAttention")}

_POOLING = (
    "_EMBEDDING_MODELS",
    "_LATE_INTERACTION_MODELS",
    "_REWARD_MODELS",
    "_TOKEN_CLASSIFICATION_MODELS",
    "_SEQUENCE_CLASSIFICATION_MODELS",
)
_GENERATING = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_SPECULATIVE_DECODING_MODELS")


@dataclasses.dataclass(frozen=True)
class Cache:
    """One kind of cache that a layer may have."""

    layer: str
    spec: str
    packed: str = ""
    """The layer's ``tokens_per_state``, as its source has it. Empty: 1."""
    replays: bool = False

    @property
    def words(self) -> str:
        if self.spec == "MambaSpec":
            return f"MambaSpec of {self.layer}"
        packed = " with tokens_per_state" if self.packed else ""
        return self.spec + packed + (" with bounded replay" if self.replays else "")

    @property
    def problem(self) -> str | None:
        """Why the connector refuses it."""
        return spec_problem(self.example())

    def example(self) -> Any:
        """Returns a small spec of this kind."""
        kind = getattr(kv_cache_interface, self.spec)
        values: dict[str, Any] = {
            "block_size": 64,
            "num_kv_heads": 1,
            "head_size": 64,
            "dtype": torch.float16,
            "sliding_window": 128,
            "attention_chunk_size": 128,
            "rswa_window": 128,
            "shapes": ((4, 4),),
            "dtypes": (torch.float16,),
            "page_size": 64,
            "blocks_per_request": 1,
        }
        if self.packed:
            values["tokens_per_state"] = Fraction(1, 4) if self.packed.startswith("Fraction") else 4
        if self.replays:
            values["bounded_replay"] = True
        fields = {one.name: one for one in dataclasses.fields(kind)}
        wanted = {
            name
            for name, one in fields.items()
            if one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
        }
        return kind(
            **{
                name: values[name]
                for name in (wanted | {"tokens_per_state", "bounded_replay"}) & {*values} & {*fields}
            }
        )


class _Registry:
    """vLLM's registry, with the caches of each model class."""

    def __init__(self) -> None:
        self._sources = Sources(Path(vllm.__file__).parents[1], _READ)
        self._models = registry.ModelRegistry.models

    def rows(self) -> list[Row]:
        generating = {name for table in _GENERATING for name in getattr(registry, table)}
        generating |= {
            name
            for table in ("_TRANSFORMERS_SUPPORTED_MODELS", "_TRANSFORMERS_BACKEND_MODELS")
            for name, (_, made) in getattr(registry, table).items()
            if made.endswith("ForCausalLM")
        }
        pooling = {name for table in _POOLING for name in getattr(registry, table)}
        pooling |= {*registry._TRANSFORMERS_BACKEND_MODELS}
        return [
            Row(name, (), "no KV cache", "it generates no tokens")
            if name in pooling - generating
            else self._row(name)
            for name in self._models
        ]

    def _row(self, name: str) -> Row:
        caches, names = self._caches(name)
        if not caches:
            return _without_caches(name, names)
        words = tuple(sorted({cache.words for cache in caches}))
        layers = {cache.layer for cache in caches}
        if name in RUN:
            return Row(name, words, "supported", f"`{RUN[name]}`")
        if case := GPU_RUN.get(NAME, {}).get(name):
            return Row(name, words, "supported", f"GPU `{case}`")
        if reason := NOT_SHOWN.get(NAME, {}).get(name):
            return Row(name, words, "not run", reason)
        problems = {cache: problem for cache in caches if (problem := cache.problem) is not None}
        # A layer with several specs has one of them, by the configuration.
        served = {cache.layer for cache in caches if cache not in problems}
        wrong = {problem for cache, problem in problems.items() if cache.layer not in served | _RARE}
        if wrong:
            return Row(name, words, "refused", "; ".join(sorted(wrong)))
        tests = {cache: TESTS[key] for cache in caches if (key := (cache.layer, cache.spec)) in TESTS}
        optional = {_SPARSE_ONLY[1]} if _SPARSE_ONLY[0] in names else set()
        untested = served - {cache.layer for cache in tests} - _RARE - optional
        notes = [f"refused with {problem}" for problem in sorted({*problems.values()})]
        if untested:
            return Row(name, words, "not run", "; ".join([*_untested(untested), *notes]))
        rest = {
            cache.words for cache in caches if cache not in {*problems, *tests} and cache.layer not in _RARE
        }
        notes += [f"not run with {one}" for one in sorted(rest - {cache.words for cache in tests})]
        notes += [f"not run with {layer}" for layer in sorted(optional & layers)]
        shown = ", ".join(f"`{test}`" for test in sorted({*tests.values()}))
        return Row(name, words, "supported", "; ".join([shown, *notes]))

    def _caches(self, name: str) -> tuple[set[Cache], set[str]]:
        """Returns the caches of a model class, and the names of all that it leads to."""
        model, sources = self._models[name], self._sources
        found = sources.find(model.module_name, model.class_name)
        made = {one for each in found for one in (each, *sources.made_by(each))}
        names = {one.name for one in made}
        layers = [one for one in made if _is_layer(sources, one) and _is_made(one, names)]
        return {cache for layer in layers for cache in layer_caches(sources, layer, made)}, names


def vllm_rows() -> list[Row]:
    """Returns a row for each architecture of vLLM's registry."""
    return _Registry().rows()


def _untested(layers: set[str]) -> list[str]:
    """Returns which of these layers no test has, and which ones only a GPU case of another class has."""
    elsewhere = {layer: case for layer, case in GPU_LAYERS.get(NAME, {}).items() if layer in layers}
    words = []
    if without := ", ".join(sorted(layers - {*elsewhere})):
        words.append(f"no test has {without}")
    for case in sorted({*elsewhere.values()}):
        shown = ", ".join(sorted(layer for layer, one in elsewhere.items() if one == case))
        words.append(f"GPU `{case}`, of another class, has {shown}")
    return words


def _without_caches(name: str, names: set[str]) -> Row:
    if "init_vllm_registered_model" in names:
        return Row(name, ("its language model's",), "supported", "`pictures`, as far as its language model")
    if "EncoderOnlyAttention" in names:
        return Row(name, (), "no KV cache", "an encoder alone")
    if name in registry._SPECULATIVE_DECODING_MODELS:
        return Row(name, (), "no KV cache", "a drafter without attention")
    return Row(name, (), "unknown", "no layer with a KV cache was found")


def _is_layer(sources: Sources, one: Definition) -> bool:
    above = {base.name for base in sources.lineage(one)}
    return "AttentionLayerBase" in above and one.name != "AttentionLayerBase"


def _is_made(layer: Definition, names: set[str]) -> bool:
    user, maker = _ONLY_WITH.get(layer.name, ("", ""))
    return user not in names or maker in names


def layer_caches(sources: Sources, layer: Definition, made: Iterable[Definition]) -> Iterator[Cache]:
    """Yields the kinds of cache that a layer's get_kv_cache_spec may return, in a model of these classes."""
    specs: set[str] = set()
    packed, replays = "", False
    for _, method in sources.methods(layer, "get_kv_cache_spec"):
        for node in ast.walk(method):
            match node:
                case ast.Call(func=ast.Name(id=name)) if _is_spec(name):
                    specs.add(name)
                case ast.keyword(arg="tokens_per_state", value=value) if ast.unparse(value) != "1":
                    packed = packed or ast.unparse(value).removeprefix("self.").removeprefix("_")
                case ast.keyword(arg="bounded_replay"):
                    makers = {above for one in made for above in sources.lineage(one)}
                    replays = any(_gives(one, layer.name, "bounded_replay") for one in makers)
    for spec in specs:
        yield Cache(layer.name, spec, packed)
        if replays:
            yield Cache(layer.name, spec, packed, replays)


def _gives(maker: Definition, layer: str, argument: str) -> bool:
    """Whether a class makes a layer with this argument."""
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == layer
        and any(one.arg == argument for one in node.keywords)
        for node in ast.walk(maker.node)
    )


def _is_spec(name: str) -> bool:
    kind = getattr(kv_cache_interface, name, None)
    return isinstance(kind, type) and issubclass(kind, kv_cache_interface.KVCacheSpec)
