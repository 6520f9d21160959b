"""Reads from a model's config.json which layers have which caches, of how many heads.

The names are Hugging Face's. A value that config.json omits is the default of its configuration class.
``layout`` knows how vLLM divides and places these caches.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


class ConfigError(ValueError):
    """A configuration that does not describe its caches, or not in a known way."""


@dataclass(frozen=True)
class Attention:
    """K and V of each token."""

    heads: int
    head_size: int
    kind: str = "full_attention"
    window: int = 0  # tokens to which a token attends, itself included, or of a chunk; 0: all before it

    @property
    def words(self) -> str:
        name = self.kind.replace("_", " ")
        return f"{name} ({self.window:,} tokens)" if self.window else name


@dataclass(frozen=True)
class Latent:
    """One vector of each token for all heads (MLA)."""

    size: int

    words = "latent attention (MLA)"


@dataclass(frozen=True)
class RecurrentState:
    """A recurrent state of each request: the last inputs of a convolution over ``pieces``, and a recurrent
    matrix."""

    kind: str
    words: str
    pieces: tuple[tuple[str, int, int], ...]  # name, dims of a unit, units
    rows: int
    heads: int = 0
    shape: tuple[int, ...] = ()  # shape of one head's state
    dtype: str | None = None  # of the recurrent matrix; None: the convolution's
    drafts: bool = True  # whether the convolution keeps one more row for each drafted token


Cache = Attention | Latent | RecurrentState


@dataclass(frozen=True)
class Layer:
    name: str
    index: int  # in the model; pipeline stages divide these
    cache: Cache
    needed: bool = True


@dataclass(frozen=True)
class Model:
    architecture: str
    kind: str
    dtype: str
    kv_dtype: str  # that the checkpoint requires, or "auto"
    attention_heads: int = 0  # divided by tensor parallelism; 0: there are none
    depth: int = 0
    layers: tuple[Layer, ...] = ()
    drafters: int = 0  # layers that predict more tokens (MTP)
    refused: str | None = None
    """Reason for which no pair of engines can serve it."""


@dataclass(frozen=True)
class _Config:
    """The part of a config.json that describes the text model."""

    kind: str
    values: Mapping[str, Any]

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def number(self, *keys: str, default: int | None = None) -> int:
        """Returns the first of these keys that the configuration has."""
        value = next((self.values[key] for key in keys if self.values.get(key) is not None), default)
        if value is None:
            raise ConfigError(
                f"the configuration of {self.kind} has no {' or '.join(keys)}: it is incomplete. Save it "
                "with transformers, which writes every value"
            )
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"{keys[0]} is {value!r} in {self.kind}'s configuration, not a number from 1")
        return value

    @property
    def depth(self) -> int:
        return self.number("num_hidden_layers")

    @property
    def attention(self) -> Attention:
        heads = self.number("num_attention_heads")
        divided = self.get("head_dim") is None or self.kind in _DIVIDED
        head_size = self.number("hidden_size") // heads if divided else self.number("head_dim")
        return Attention(self.number("num_key_value_heads", "num_kv_heads", default=heads), head_size)

    def layer_types(self, *keys: str) -> list[str] | None:
        """Returns the type of each layer, by today's names; None: the configuration has no types."""
        types = next((self.values[key] for key in keys if self.values.get(key)), None)
        return None if types is None else [_TODAYS.get(str(kind), str(kind)) for kind in types]


_TODAYS = {
    "attention": "full_attention",
    "mamba": "linear_attention",
    "M": "linear_attention",
    "*": "full_attention",
}


def read_model(path: Path) -> Model:
    """Reads the model in ``path``, its directory or its config.json. Raises ConfigError."""
    file = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(file.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{file} does not exist. Give a model's directory, or its config.json") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file} is not JSON ({error}). Give a model's config.json") from None
    except RecursionError:
        raise ConfigError(f"{file} is nested too deeply. Give a model's config.json") from None
    if not isinstance(found, dict) or not isinstance(found.get("architectures"), list | tuple):
        raise ConfigError(
            f"{file} names no `architectures`: it is not the configuration of a model that engines serve"
        )
    return _model(found)


def _model(values: Mapping[str, Any]) -> Model:
    architecture = str(next(iter(values["architectures"]), "none"))
    nested = (values.get(key) for key in ("text_config", "llm_config", "language_config"))
    text = next((config for config in nested if isinstance(config, dict)), values)
    kind = str(text.get("model_type") or values.get("model_type"))
    quantization = text.get("quantization_config") or values.get("quantization_config") or {}
    said = (config.get(key) for config in (values, text) for key in ("dtype", "torch_dtype"))
    dtype = next((str(dtype) for dtype in said if dtype), "float32")
    config = _Config(kind, text)
    model = Model(
        architecture=architecture,
        kind=kind,
        dtype="bfloat16" if dtype == "float32" else dtype.removeprefix("torch."),  # as engines load it
        kv_dtype=_kv_dtype(quantization),
    )
    if values.get("is_encoder_decoder") or kind in _ENCODERS:
        return replace(model, refused="vLLM serves encoder-decoder models without connectors only")
    if kind in _REFUSED:
        return replace(model, refused=_REFUSED[kind])
    generates = any(word in architecture for word in ("ForCausalLM", "ForConditionalGeneration"))
    if kind not in _READERS or not generates:
        raise ConfigError(
            f"{architecture} (model_type {kind}) is unknown to this command, but may work. Start "
            "both engines: "
            "they decide at the handshake and report what does not fit"
        )
    layers = _READERS[kind](config)
    return replace(
        model,
        attention_heads=0 if kind in _ATTENTION_FREE else config.number("num_attention_heads"),
        depth=len(_nemotron_types(config) or ()) if kind == "nemotron_h" else config.depth,
        layers=tuple(layers),
        drafters=text.get("num_nextn_predict_layers") or text.get("mtp_num_hidden_layers") or 0,
    )


def _kv_dtype(quantization: Any) -> str:
    """Returns the dtype that vLLM uses if --kv-cache-dtype is auto."""
    if not isinstance(quantization, dict):
        return "auto"
    inner = quantization.get("quantization")
    for config in (inner if isinstance(inner, dict) else {}, quantization):
        scheme = config.get("kv_cache_scheme") or config.get("kv_cache_quant_algo")
        if isinstance(scheme, dict):
            scheme = scheme.get("type") == "float" and f"fp{scheme.get('num_bits')}"
        if scheme:
            return str(scheme).lower()
    return "auto"


# --- Models that attend in every layer


def _attending(config: _Config) -> list[Layer]:
    return [attending(index, cache) for index, cache in enumerate(_windows(config))]


def attending(index: int, cache: Cache) -> Layer:
    return Layer(f"model.layers.{index}.self_attn.attn", index, cache)


def _windows(config: _Config) -> list[Attention]:
    every, depth = config.attention, config.depth
    if not config.values.get("sliding_window", _WINDOWS.get(config.kind)) or config.kind.startswith("qwen"):
        return [every] * depth  # vLLM uses no sliding window for Qwen
    window = config.number("sliding_window", default=_WINDOWS.get(config.kind))
    if config.kind == "cohere2":
        window += 1  # its window does not count the token itself
    slides = replace(every, kind="sliding_window", window=window)
    types = config.layer_types("layer_types")
    if types is None and config.kind in _PATTERNS:
        usual = _PATTERNS[config.kind]
        pattern = config.number("sliding_window_pattern", "_sliding_window_pattern", default=usual)
        types = ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(depth)]
    if types is None:
        return [slides] * depth
    return [slides if kind == "sliding_attention" else every for kind in _exactly(types, config)]


def _exactly(types: list[str], config: _Config) -> list[str]:
    if len(types) != config.depth:
        raise ConfigError(f"config.json has types of {len(types)} layers, but {config.depth} layers")
    return types


def _chunked(config: _Config) -> list[Layer]:
    """Llama 4: every fourth layer attends to all tokens, without positions."""
    every, chunk = config.attention, config.values.get("attention_chunk_size", 8192)
    rotary = config.get("no_rope_layers") or [(i + 1) % 4 != 0 for i in range(config.depth)]
    local = replace(every, kind="chunked_local_attention", window=chunk or 0) if chunk else every
    return [attending(i, local if rotates else every) for i, rotates in enumerate(rotary)]


def _latent(config: _Config) -> list[Layer]:
    if config.get("kv_lora_rank") is None:
        return _attending(config)
    return [attending(index, _latent_of(config)) for index in range(config.depth)]


def _latent_of(config: _Config) -> Latent:
    return Latent(config.number("kv_lora_rank") + config.number("qk_rope_head_dim"))


# --- Models with states


def _state(index: int, state: RecurrentState) -> Layer:
    return Layer(f"model.layers.{index}.mixer", index, state)


def _hybrid(
    config: _Config, state: RecurrentState, types: list[str] | None, cache: Cache | None = None
) -> list[Layer]:
    if types is None:
        raise ConfigError(f"the configuration of {config.kind} has no layer_types. Save it with transformers")
    attends = config.attention if cache is None else cache
    return [
        attending(index, attends) if kind == "full_attention" else _state(index, state)
        for index, kind in enumerate(types)
        if kind in ("full_attention", "linear_attention", "conv")
    ]


def _mamba2(
    heads: int, head_dim: int, groups: int, size: int, kernel: int, dtype: str | None = None
) -> RecurrentState:
    pieces = (("x", head_dim, heads), ("B", size, groups), ("C", size, groups))
    return RecurrentState("MAMBA2", "a Mamba2 state", pieces, kernel - 1, heads, (head_dim, size), dtype)


def _mamba1(channels: int, size: int, kernel: int) -> RecurrentState:
    return RecurrentState(
        "MAMBA1", "a Mamba1 state", (("x", 1, channels),), kernel - 1, channels, (size,), drafts=False
    )


def _mamba_prefixed(config: _Config) -> RecurrentState:
    """Granite 4 and Falcon-H1."""
    n = config.number
    return _mamba2(
        n("mamba_n_heads"), n("mamba_d_head"), n("mamba_n_groups"), n("mamba_d_state"), n("mamba_d_conv")
    )


def _granite_hybrid(config: _Config) -> list[Layer]:
    types = config.layer_types("layer_types", "layers_block_type")
    if types is not None and "linear_attention" not in types:
        return _attending(config)
    return _hybrid(config, _mamba_prefixed(config), types)


def _falcon_h1(config: _Config) -> list[Layer]:
    """Each layer has attention and a state."""
    state, attends = _mamba_prefixed(config), config.attention
    both = ((_state(index, state), attending(index, attends)) for index in range(config.depth))
    return [layer for layers in both for layer in layers]


def _nemotron_h(config: _Config) -> list[Layer]:
    n = config.number
    state = _mamba2(
        *(n("mamba_num_heads"), n("mamba_head_dim"), n("n_groups"), n("ssm_state_size"), n("conv_kernel")),
        dtype=config.get("mamba_ssm_cache_dtype") or "float32",
    )
    return _hybrid(config, state, _nemotron_types(config))


def _nemotron_types(config: _Config) -> list[str] | None:
    """Returns the types of all layers, whatever num_hidden_layers is. Some layers keep nothing."""
    return config.layer_types("layers_block_type", "layer_types", "hybrid_override_pattern")


def _pure_mamba2(config: _Config) -> list[Layer]:
    n = config.number
    state = _mamba2(n("num_heads"), n("head_dim"), n("n_groups"), n("state_size"), n("conv_kernel"))
    return [_state(index, state) for index in range(config.depth)]


def _pure_mamba1(config: _Config) -> list[Layer]:
    n = config.number
    channels = n("intermediate_size", default=2 * n("hidden_size"))
    return [_state(i, _mamba1(channels, n("state_size"), n("conv_kernel"))) for i in range(config.depth)]


def _jamba(config: _Config) -> list[Layer]:
    n = config.number
    channels = n("mamba_expand", default=2) * n("hidden_size")
    state = _mamba1(channels, n("mamba_d_state", default=16), n("mamba_d_conv", default=4))
    types = config.layer_types("layers_block_type", "layer_types")
    if types is None:
        period, offset = n("attn_layer_period", default=8), config.values.get("attn_layer_offset", 4)
        types = [
            "full_attention" if i % period == offset else "linear_attention" for i in range(config.depth)
        ]
    return _hybrid(config, state, types)


def _delta_net(config: _Config) -> list[Layer]:
    """Qwen3-Next and Qwen3.5."""
    n = config.number
    keys, key_dim = n("linear_num_key_heads"), n("linear_key_head_dim")
    values, value_dim = n("linear_num_value_heads"), n("linear_value_head_dim")
    pieces = (("q", key_dim, keys), ("k", key_dim, keys), ("v", value_dim, values))
    rows = n("linear_conv_kernel_dim") - 1
    shape, dtype = (value_dim, key_dim), config.get("mamba_ssm_dtype")
    state = RecurrentState("GDN_ATTN", "a gated delta net's state", pieces, rows, values, shape, dtype)
    types = config.layer_types("layer_types")
    if types is None:
        every = n("full_attention_interval", default=4)
        types = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(config.depth)]
    return _hybrid(config, state, types)


def _kimi_linear(config: _Config) -> list[Layer]:
    linear = config.get("linear_attn_config")
    if not isinstance(linear, dict):
        return _latent(config)
    of_linear = _Config(config.kind, linear)
    heads, size = of_linear.number("num_heads"), of_linear.number("head_dim")
    pieces = tuple((name, size, heads) for name in "qkv")
    rows = of_linear.number("short_conv_kernel_size") - 1
    state = RecurrentState(
        "GDN_ATTN", "a Kimi delta net's state", pieces, rows, heads, (size, size), "float32"
    )
    deltas = linear.get("kda_layers") or ()  # counted from 1
    types = ["linear_attention" if i + 1 in deltas else "full_attention" for i in range(config.depth)]
    return _hybrid(config, state, types, _latent_of(config))


def _short_conv(config: _Config) -> list[Layer]:
    dims = config.number("conv_dim", "hidden_size")
    rows = config.number("conv_L_cache", default=3) - 1
    state = RecurrentState("SHORT_CONV", "a short convolution's state", (("x", 1, dims),), rows, drafts=False)
    types = config.layer_types("layer_types")
    if types is None:
        attends = config.get("full_attn_idxs") or range(config.depth)
        types = ["full_attention" if i in attends else "conv" for i in range(config.depth)]
    return _hybrid(config, state, types)


# Models for which vLLM divides the hidden size among the heads, whatever head_dim is.
_DIVIDED = {"granitemoe", "granitemoeshared", "olmoe", "qwen2", "qwen2_moe", "stablelm"}
# For a config.json that does not name the layers with a window: each n-th layer has none.
_PATTERNS = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4, "gpt_oss": 2, "olmo3": 4, "exaone4": 4}
# For a config.json without the window's length.
_WINDOWS = {
    "mistral": 4096, "gemma2": 4096, "gemma3_text": 4096, "cohere2": 4096, "gpt_oss": 128, "olmo3": 4096
}  # fmt: skip

_READERS: dict[str, Callable[[_Config], list[Layer]]] = {
    **dict.fromkeys(
        (
            *("apertus", "arcee", "cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "exaone4", "gemma"),
            *("gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt_oss", "granite", "granitemoe"),
            *("granitemoeshared", "llama", "minimax_m2", "mistral", "mixtral", "nemotron", "olmo", "olmo2"),
            *("olmo3", "olmoe", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
            *("qwen3_vl_text", "qwen3_vl_moe_text", "seed_oss", "smollm3", "stablelm", "starcoder2"),
        ),
        _attending,
    ),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2"), _latent),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _delta_net),
    **dict.fromkeys(("lfm2", "lfm2_moe"), _short_conv),
    **dict.fromkeys(("mamba", "falcon_mamba"), _pure_mamba1),
    "llama4_text": _chunked,
    "granitemoehybrid": _granite_hybrid,
    "falcon_h1": _falcon_h1,
    "nemotron_h": _nemotron_h,
    "mamba2": _pure_mamba2,
    "jamba": _jamba,
    "kimi_linear": _kimi_linear,
}
_ATTENTION_FREE = {"mamba", "falcon_mamba", "mamba2"}
_ENCODERS = {"bart", "mbart", "t5", "whisper"}
_REFUSED = {
    "deepseek_v4": "its caches have one entry for several tokens, which WriteImmConnector does not move yet"
}
