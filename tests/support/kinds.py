"""A small random model of each kind, with real weights. kv_connector/lab/model.py explains why not dummy
ones.

Models that the lab does not make are built by transformers, drawn at the scale of a trained network, and
saved as any checkpoint is.
"""

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deriving_llama import ARCHITECTURE
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    LlavaConfig,
    LlavaProcessor,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)
from transformers.models.clip import CLIPImageProcessorPil, CLIPVisionConfig
from transformers.models.deepseek_v2 import DeepseekV2Config
from transformers.models.deepseek_v3 import DeepseekV3Config
from transformers.models.falcon_h1 import FalconH1Config
from transformers.models.gemma4 import Gemma4TextConfig
from transformers.models.gpt_oss import GptOssConfig
from transformers.models.granitemoehybrid import GraniteMoeHybridConfig
from transformers.models.lfm2 import Lfm2Config
from transformers.models.llama4 import Llama4TextConfig
from transformers.models.mamba2 import Mamba2Config
from transformers.models.nemotron_h import NemotronHConfig
from transformers.models.qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_next import Qwen3NextConfig

from kv_connector.lab.model import (
    BOS,
    EOS,
    PAD,
    SCORE_SPREAD,
    VOCABULARY,
    make_gemma3,
    make_llama,
    make_mixtral,
    write_tokenizer,
)

SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "tie_word_embeddings": False,
}

TIED = SMALL | {"tie_word_embeddings": True}

# Share of a state head that is forgotten per token: from 0.2 % to 13 %, so that states remember both a
# prompt's beginning and its end.
TIME_STEP = 0.13
DECAY = (0.02, 1.0)

# Width and height in pixels of a picture and of one patch, and the token that stands for a patch.
PICTURE, PATCH = 56, 14
IMAGE = PAD + 1

LORA = {"rank": 8, "spread": 0.3}


def write(
    directory: Path,
    config: PreTrainedConfig,
    dtype: torch.dtype = torch.float32,
    auto: Any = AutoModelForCausalLM,
) -> Path:
    """Writes the model of a transformers configuration into `directory` and returns its path."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = auto.from_config(config)
        for name, weight in model.named_parameters():
            _draw(name, weight, tied=config.tie_word_embeddings)
    model.to(dtype).save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def _draw(name: str, weight: torch.Tensor, *, tied: bool) -> None:
    kind = name.split(".")[-2] if name.endswith(".weight") else name.split(".")[-1]
    if kind == "A_log":
        weight.copy_(torch.linspace(*DECAY, len(weight)).log())
    elif kind == "dt_bias":
        weight.fill_(math.log(math.expm1(TIME_STEP)))
    elif kind in ("q_layernorm", "k_layernorm"):
        weight.fill_(SCORE_SPREAD**0.5)
    elif weight.dim() > 1:
        scale = weight.shape[-1] ** -0.5
        if kind in ("embed_tokens", "embeddings"):
            # Tied embeddings are the output matrix too: at full scale the model would repeat its last input
            # token.
            scale = scale / 8 if tied else 1.0
        elif kind in ("q_proj", "k_proj", "kv_a_proj_with_mqa"):
            scale *= SCORE_SPREAD**0.5
        elif kind in ("conv", "conv1d"):
            scale = weight[0].numel() ** -0.5
        elif kind in ("o_proj", "out_proj"):
            scale *= 2
        weight.normal_(std=scale)


LATENT: dict[str, Any] = {
    **SMALL,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "n_group": 1,
    "topk_group": 1,
}


# vLLM's CPU kernel for rotary embeddings is wrong for MLA's slices of queries: its result for a token depends
# on later tokens. PyTorch's own operations are right.
#
# On a processor with AMX, vLLM takes another kernel, which refuses float32.
MLA = '--compilation-config {"custom_ops":["-rotary_embedding"]} --attention-backend CPU_MLA'


def make_deepseek_v2(directory: Path, *, head_dim: int = 32) -> Path:
    """Writes a model with latent attention (MLA). vLLM's CPU kernel supports only a latent of 512 + 64
    values. The GPU prefill kernel supports only heads of 128."""
    config = DeepseekV2Config(
        **LATENT,
        num_hidden_layers=3,
        q_lora_rank=None,
        qk_nope_head_dim=head_dim,
        v_head_dim=head_dim,
        first_k_dense_replace=1,
        topk_method="greedy",
    )
    return write(directory, config)


def make_mtp(directory: Path, *, head_dim: int = 32) -> Path:
    """Writes a DeepSeek-V3 of one layer that predicts two tokens. The predictor of the second token computes
    what the layer does, from the tokens alone."""
    config = DeepseekV3Config(
        **LATENT,
        num_hidden_layers=1,
        q_lora_rank=128,
        qk_nope_head_dim=head_dim,
        v_head_dim=head_dim,
        first_k_dense_replace=0,
    )
    write(directory, config)
    weights = _with_unit_embeddings(directory)
    first, second = "model.layers.0.", "model.layers.1."
    weights |= {
        second + name.removeprefix(first): weight.clone()
        for name, weight in weights.items()
        if name.startswith(first)
    }
    norm = weights["model.norm.weight"]
    weights |= {f"{second}{name}.weight": norm.clone() for name in ("enorm", "hnorm", "shared_head.norm")}
    weights[f"{second}eh_proj.weight"] = torch.eye(len(norm), 2 * len(norm))
    for name, of in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        weights[f"{second}{name}.weight"] = weights[f"{of}.weight"].clone()
    _save(directory, weights)
    more = {"num_nextn_predict_layers": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    return _configure(directory, **more)


MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 16, "mamba_d_conv": 4}


def make_granite(directory: Path) -> Path:
    """Writes a Granite 4: alternating layers of Mamba2 (two groups of B and C) and of attention."""
    config = GraniteMoeHybridConfig(
        **SMALL,
        **MAMBA2,
        num_hidden_layers=4,
        layer_types=["mamba", "attention", "mamba", "attention"],
        mamba_n_groups=2,
        num_local_experts=0,
        shared_intermediate_size=512,
        position_embedding_type="rope",
        attention_multiplier=64**-0.5,
    )
    return write(directory, config)


def make_nemotron_h(directory: Path) -> Path:
    """Writes a model whose layers are Mamba2, attention without positions, or an MLP."""
    config = NemotronHConfig(
        **SMALL,
        layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention", "full_attention"],
        head_dim=64,
        mamba_num_heads=8,
        mamba_head_dim=64,
        ssm_state_size=16,
        n_groups=2,
    )
    return write(directory, config)


def make_falcon_h1(directory: Path) -> Path:
    """Writes a model with Mamba2 and attention side by side in each layer. All heads share one group of B and
    C."""
    config = FalconH1Config(**SMALL, **MAMBA2, num_hidden_layers=3, mamba_n_groups=1, mamba_d_ssm=512)
    return write(directory, config)


DELTA_NET: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}


def make_qwen3_next(directory: Path) -> Path:
    """Writes a model with a gated delta net in three layers of four. Its CPU kernel supports only
    bfloat16."""
    config = Qwen3NextConfig(
        **SMALL,
        **DELTA_NET,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
    )
    return write(directory, config, torch.bfloat16)


def make_qwen35(directory: Path) -> Path:
    """Writes a Qwen 3.5 without pictures: delta nets as in Qwen3-Next, and no experts."""
    config = Qwen3_5TextConfig(**SMALL, **DELTA_NET)
    return write(directory, config, torch.bfloat16)


def make_lfm2(directory: Path) -> Path:
    """Writes an LFM2: layers of attention and of a short convolution, whose state is its last inputs."""
    config = Lfm2Config(
        **TIED,
        num_hidden_layers=4,
        layer_types=["conv", "full_attention", "conv", "full_attention"],
        conv_L_cache=3,
        block_auto_adjust_ff_dim=False,
        block_dim=SMALL["hidden_size"],
        conv_dim=SMALL["hidden_size"],
    )
    return write(directory, config)


def make_llama4(directory: Path) -> Path:
    """Writes a Llama 4: attention within chunks of 128 tokens in three layers of four."""
    config = Llama4TextConfig(
        **SMALL,
        num_hidden_layers=4,
        head_dim=64,
        intermediate_size_mlp=512,
        num_local_experts=4,
        attention_chunk_size=128,
        use_qk_norm=False,
    )
    return write(directory, config)


def make_mamba2(directory: Path) -> Path:
    """Writes a model with Mamba2 in every layer, and no attention."""
    config = Mamba2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        num_heads=8,
        head_dim=64,
        state_size=16,
        n_groups=2,
        num_hidden_layers=4,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    return write(directory, config)


def make_gpt_oss(directory: Path) -> Path:
    """Writes a gpt-oss: sliding windows with sinks in every other layer, and experts."""
    config = GptOssConfig(
        **SMALL,
        num_hidden_layers=4,
        head_dim=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=128,
    )
    return write(directory, config)


def make_gemma4(directory: Path) -> Path:
    """Writes a Gemma 4: sliding windows in every other layer. The last two layers read pages of earlier
    layers."""
    config = Gemma4TextConfig(
        **TIED,
        num_hidden_layers=6,
        layer_types=["sliding_attention", "full_attention"] * 3,
        num_kv_shared_layers=2,
        head_dim=64,
        sliding_window=128,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=64,
    )
    return write(directory, config)


def make_llava(directory: Path) -> Path:
    """Writes a LLaVA: a picture is 16 tokens, which a CLIP computes from its patches."""
    text = LlamaConfig(**SMALL, num_hidden_layers=4, head_dim=64)
    vision = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=PICTURE,
        patch_size=PATCH,
        projection_dim=64,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=IMAGE,
        image_seq_length=(PICTURE // PATCH) ** 2,
    )
    write(directory, config, auto=AutoModelForImageTextToText)
    weights = load_file(directory / "model.safetensors")
    tower = "vision_tower."  # published checkpoints, which vLLM reads, have one more level here
    _save(directory, {name.replace(tower, f"{tower}vision_model."): one for name, one in weights.items()})
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    assert tokenizer.convert_tokens_to_ids("<image>") == IMAGE
    size = {"height": PICTURE, "width": PICTURE}
    LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": PICTURE}, crop_size=size),
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    ).save_pretrained(directory)
    return directory


def make_fp8_scales(directory: Path, *, scale: float) -> Path:
    """Writes the Llama of `make_llama` with scales for a KV cache in fp8."""
    make_llama(directory)
    weights = load_file(directory / "model.safetensors")
    for layer in range(_configuration(directory)["num_hidden_layers"]):
        for name in ("k_scale", "v_scale"):
            weights[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor(scale)
    _save(directory, weights)
    scheme = {
        "num_bits": 8,
        "type": "float",
        "strategy": "tensor",
        "dynamic": False,
        "symmetric": True,
    }
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {},
        "ignore": [],
        "kv_cache_scheme": scheme,
    }
    return _configure(directory, quantization_config=quantization)


def make_deriving(directory: Path) -> Path:
    """Writes the Llama of the plugin deriving_llama."""
    make_llama(directory)
    return _configure(directory, architectures=[ARCHITECTURE])


def make_one_layer(directory: Path) -> Path:
    """Writes the target of `make_eagle`'s drafter: a Llama whose embeddings have unit length. Its first norm
    leaves them unchanged."""
    make_llama(directory, layers=1)
    _save(directory, _with_unit_embeddings(directory))
    return directory


def _with_unit_embeddings(directory: Path) -> dict[str, torch.Tensor]:
    """Returns the model's weights with embeddings that are normalised."""
    weights = load_file(directory / "model.safetensors")
    embeddings = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = embeddings / embeddings.square().mean(1, keepdim=True).sqrt()
    return weights


def make_eagle(directory: Path) -> Path:
    """Writes an EAGLE drafter that computes the same as its target, `make_one_layer`, from the tokens
    alone."""
    make_one_layer(directory)
    weights = load_file(directory / "model.safetensors")
    prefix = "model.layers.0."
    drafter = {
        name.removeprefix("model."): weight
        for name, weight in weights.items()
        if name.startswith(prefix) and "input_layernorm" not in name
    }
    hidden = SMALL["hidden_size"]
    drafter["fc.weight"] = torch.eye(hidden, 2 * hidden)
    _save(directory, drafter)
    return directory


def make_quiet(directory: Path) -> Path:
    """Writes the target of `make_eagle3`'s drafter: a Llama in which attention's output far outweighs the
    token's embedding."""
    make_llama(directory, layers=1)
    weights = load_file(directory / "model.safetensors")
    weights["model.embed_tokens.weight"] *= 0.01
    _save(directory, weights)
    return directory


def make_eagle3(directory: Path) -> Path:
    """Writes an EAGLE3 drafter that computes nearly the same as its target, `make_quiet`, from the tokens
    alone. Only attention sees their embeddings."""
    make_quiet(directory)
    weights = load_file(directory / "model.safetensors")
    drafter = {name.removeprefix("model."): weight for name, weight in weights.items()}
    del drafter["embed_tokens.weight"]
    for name in ("q_proj", "k_proj", "v_proj"):
        key = f"layers.0.self_attn.{name}.weight"
        drafter[key] = torch.cat([drafter[key], torch.zeros_like(drafter[key])], dim=1)
    layers, hidden = [0, 1], SMALL["hidden_size"]
    drafter["layers.0.hidden_norm.weight"] = torch.zeros(hidden)
    drafter["fc.weight"] = torch.eye(hidden, len(layers) * hidden)
    _save(directory, drafter)
    return _configure(
        directory,
        architectures=["LlamaForCausalLMEagle3"],
        draft_vocab_size=VOCABULARY,
        norm_before_residual=True,
        # Each of vLLM's model runners reads another one of these places.
        eagle_aux_hidden_state_layer_ids=layers,
        eagle_config={"eagle_aux_hidden_state_layer_ids": layers},
    )


def make_adapter(directory: Path, *, of: Callable[[Path], Path] = make_llama, seed: int = 0) -> Path:
    """Writes a LoRA adapter for the text layers of the model that `of` makes."""
    base = of(directory / "base")
    generator = torch.Generator().manual_seed(seed)
    rank = LORA["rank"]
    weights = {}
    for name, weight in load_file(base / "model.safetensors").items():
        module, _, projection = name.removesuffix(".weight").rpartition(".")
        if projection in ("q_proj", "v_proj") and "vision_tower" not in module:
            outputs, inputs = weight.shape
            key = f"base_model.model.{module}.{projection}.lora"
            weights[f"{key}_A.weight"] = torch.randn(rank, inputs, generator=generator) * inputs**-0.5
            weights[f"{key}_B.weight"] = torch.randn(outputs, rank, generator=generator) * LORA["spread"]
    save_file(weights, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def _save(directory: Path, weights: dict[str, torch.Tensor]) -> None:
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def _configuration(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return config


def _configure(directory: Path, **more: Any) -> Path:
    (directory / "config.json").write_text(json.dumps(_configuration(directory) | more, indent=1))
    return directory


KINDS: dict[str, Callable[[Path], Path]] = {
    "llama": make_llama,
    "llama-retrained": partial(make_llama, seed=1),
    "mqa": partial(make_llama, kv_heads=1),
    "head80": partial(make_llama, head_dim=80),
    "head128": partial(make_llama, head_dim=128),
    "head256": partial(make_llama, head_dim=256),
    "other": partial(make_llama, intermediate=384),
    "fp8-scales": partial(make_fp8_scales, scale=0.25),
    "fp8-other-scales": partial(make_fp8_scales, scale=0.5),
    "one-layer": make_one_layer,
    "eagle": make_eagle,
    "quiet": make_quiet,
    "eagle3": make_eagle3,
    "mtp": make_mtp,
    "adapter": make_adapter,
    "deriving": make_deriving,
    "gemma3": partial(make_gemma3, sliding_window=128),
    "mixtral": make_mixtral,
    "deepseek-v2": make_deepseek_v2,
    "granite": make_granite,
    "nemotron-h": make_nemotron_h,
    "falcon-h1": make_falcon_h1,
    "qwen3-next": make_qwen3_next,
    "qwen3.5": make_qwen35,
    "lfm2": make_lfm2,
    "llama4": make_llama4,
    "mamba2": make_mamba2,
    "gpt-oss": make_gpt_oss,
    "gemma4": make_gemma4,
    "llava": make_llava,
    "llava-adapter": partial(make_adapter, of=make_llava),
    "llava-other-adapter": partial(make_adapter, of=make_llava, seed=1),
}
