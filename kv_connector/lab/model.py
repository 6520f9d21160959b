"""Small random models that vLLM loads like any other: config.json, weights and a tokenizer, made offline.

vLLM's own `--load-format dummy` does not work here. It fills every tensor, norms included, from [-1e-3,
1e-3]. So attention adds about a ten-thousandth to the residual stream, and the next token depends on the last
one alone. Greedy output would then be equal whatever lies in the KV cache.

The weights here are drawn at the scale of a trained network: each matrix keeps its input's variance, and
attention scores have a spread of several units. So the output depends on tokens all over the prompt, and one
wrong page shows.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

Weights = dict[str, NDArray[np.float32]]

# The 256 bytes and three special tokens, rounded up to a multiple of 64, vLLM's padding of the vocabulary.
VOCABULARY = 320
BOS, EOS, PAD = 256, 257, 258

# Spread of the attention scores before softmax. 1 would average over the whole context, and no page would
# matter. At 3 the few best-matching tokens carry most of the weight, wherever they stand.
SCORE_SPREAD = 3.0


def make_llama(
    directory: Path,
    *,
    layers: int = 4,
    hidden: int = 256,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    intermediate: int = 512,
    max_positions: int = 8192,
    seed: int = 0,
) -> Path:
    """Writes a Llama-shaped model (one KV cache group) into `directory` and returns it.

    The KV cache takes layers * 2 * kv_heads * head_dim values a token. Equal arguments give equal bytes.
    """
    shape = _shape(layers, hidden, heads, kv_heads, head_dim, intermediate, max_positions)
    return _make_llama_like(
        directory, "Llama", shape, lambda rng, prefix: _mlp(rng, prefix, hidden, intermediate), seed
    )


def make_gemma3(
    directory: Path,
    *,
    layers: int = 6,
    hidden: int = 256,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    intermediate: int = 512,
    sliding_window: int = 256,
    full_attention_every: int = 3,
    max_positions: int = 8192,
    seed: int = 0,
) -> Path:
    """Writes a Gemma3-shaped model into `directory` and returns it.

    Every `full_attention_every`-th layer sees the whole context. The others see a sliding window of
    `sliding_window` tokens. With the defaults vLLM makes three KV cache groups, two of them with a window.
    """
    kinds = [
        "full_attention" if (layer + 1) % full_attention_every == 0 else "sliding_attention"
        for layer in range(layers)
    ]
    config: dict[str, Any] = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": kinds,
        "sliding_window": sliding_window,
        "query_pre_attn_scalar": head_dim,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "tie_word_embeddings": True,
    }
    config |= _shape(layers, hidden, heads, kv_heads, head_dim, intermediate, max_positions)
    rng = np.random.default_rng(seed)
    # Gemma multiplies the embeddings by sqrt(hidden) and uses them as the output matrix too. At unit variance
    # the residual stream would answer with the token it started from. At an eighth the layers decide.
    embeddings = _normal(rng, VOCABULARY, hidden, scale=hidden**-0.5 / 8)
    weights: Weights = {"model.embed_tokens.weight": embeddings}
    norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    for prefix in _layer_prefixes(layers):
        weights |= _attention(rng, prefix, hidden, heads, kv_heads, head_dim)
        weights |= _mlp(rng, prefix, hidden, intermediate)
        for norm in norms:
            # Gemma's norms multiply by 1 + weight.
            weights[f"{prefix}.{norm}_layernorm.weight"] = np.zeros(hidden, dtype=np.float32)
        # Queries and keys are normalised to unit variance, so only these weights can spread them.
        for norm in ("q_norm", "k_norm"):
            weights[f"{prefix}.self_attn.{norm}.weight"] = np.full(
                head_dim, SCORE_SPREAD**0.5 - 1, dtype=np.float32
            )
    weights["model.norm.weight"] = np.zeros(hidden, dtype=np.float32)
    return _write(directory, config, weights)


def make_mixtral(
    directory: Path,
    *,
    layers: int = 4,
    hidden: int = 256,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    intermediate: int = 512,
    experts: int = 4,
    max_positions: int = 8192,
    seed: int = 0,
) -> Path:
    """Writes a Mixtral-shaped model (two of its experts a token) into `directory` and returns it."""
    shape: dict[str, Any] = {
        "num_local_experts": experts,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    }
    shape |= _shape(layers, hidden, heads, kv_heads, head_dim, intermediate, max_positions)
    return _make_llama_like(
        directory,
        "Mixtral",
        shape,
        lambda rng, prefix: _experts(rng, prefix, experts, hidden, intermediate),
        seed,
    )


def _make_llama_like(
    directory: Path,
    name: str,
    shape: dict[str, Any],
    feed_forward: Callable[[np.random.Generator, str], Weights],
    seed: int,
) -> Path:
    """Writes Llama's attention, norms and output around `feed_forward`, which draws the weights of each
    layer's prefix."""
    config: dict[str, Any] = {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": name.lower(),
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    config |= shape
    hidden = shape["hidden_size"]
    heads = shape["num_attention_heads"], shape["num_key_value_heads"], shape["head_dim"]
    rng = np.random.default_rng(seed)
    weights: Weights = {"model.embed_tokens.weight": _normal(rng, VOCABULARY, hidden, scale=1.0)}
    for prefix in _layer_prefixes(shape["num_hidden_layers"]):
        weights |= _attention(rng, prefix, hidden, *heads)
        weights |= feed_forward(rng, prefix)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}.{norm}.weight"] = np.ones(hidden, dtype=np.float32)
    weights["model.norm.weight"] = np.ones(hidden, dtype=np.float32)
    weights["lm_head.weight"] = _normal(rng, VOCABULARY, hidden, scale=hidden**-0.5)
    return _write(directory, config, weights)


def _shape(
    layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, intermediate: int, max_positions: int
) -> dict[str, Any]:
    if heads % kv_heads:
        raise ValueError(f"heads ({heads}) must be a multiple of kv_heads ({kv_heads})")
    return {
        "vocab_size": VOCABULARY,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-6,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "torch_dtype": "float32",
    }


def _layer_prefixes(layers: int) -> Iterator[str]:
    return (f"model.layers.{layer}" for layer in range(layers))


def _normal(rng: np.random.Generator, rows: int, columns: int, *, scale: float) -> NDArray[np.float32]:
    return (rng.standard_normal((rows, columns)) * scale).astype(np.float32)


def _attention(
    rng: np.random.Generator, prefix: str, hidden: int, heads: int, kv_heads: int, head_dim: int
) -> Weights:
    # The product of a query and a key, divided by sqrt(head_dim), has the product of their spreads.
    qk = (SCORE_SPREAD / hidden) ** 0.5
    return {
        f"{prefix}.self_attn.q_proj.weight": _normal(rng, heads * head_dim, hidden, scale=qk),
        f"{prefix}.self_attn.k_proj.weight": _normal(rng, kv_heads * head_dim, hidden, scale=qk),
        f"{prefix}.self_attn.v_proj.weight": _normal(rng, kv_heads * head_dim, hidden, scale=hidden**-0.5),
        f"{prefix}.self_attn.o_proj.weight": _normal(
            rng, hidden, heads * head_dim, scale=2 * (heads * head_dim) ** -0.5
        ),
    }


def _mlp(rng: np.random.Generator, prefix: str, hidden: int, intermediate: int) -> Weights:
    return {
        f"{prefix}.mlp.gate_proj.weight": _normal(rng, intermediate, hidden, scale=hidden**-0.5),
        f"{prefix}.mlp.up_proj.weight": _normal(rng, intermediate, hidden, scale=hidden**-0.5),
        f"{prefix}.mlp.down_proj.weight": _normal(rng, hidden, intermediate, scale=intermediate**-0.5),
    }


def _experts(rng: np.random.Generator, prefix: str, experts: int, hidden: int, intermediate: int) -> Weights:
    moe = f"{prefix}.block_sparse_moe"
    weights = {f"{moe}.gate.weight": _normal(rng, experts, hidden, scale=hidden**-0.5)}
    for expert in range(experts):
        for name, (rows, columns) in {
            "w1": (intermediate, hidden),
            "w2": (hidden, intermediate),
            "w3": (intermediate, hidden),
        }.items():
            matrix = _normal(rng, rows, columns, scale=columns**-0.5)
            weights[f"{moe}.experts.{expert}.{name}.weight"] = matrix
    return weights


def _write(directory: Path, config: dict[str, Any], weights: Weights) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(directory)
    return directory


def write_tokenizer(directory: Path) -> None:
    """Writes a byte-level tokenizer without merges: a prompt of n ASCII characters is n tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: token for token, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<pad>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "model_max_length": 1 << 20,
        "chat_template": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: ",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
