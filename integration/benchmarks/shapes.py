"""Models for measurements on GPUs: configurations alone, because dummy weights take as long as real ones."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Values of all shapes. Those without experts have 7 to 8 billion weights in bfloat16.
_COMMON = {
    "hidden_act": "silu",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "head_dim": 128,
    "rope_theta": 500000.0,
}

# Qwen3-30B-A3B with half of its layers: 15 billion weights, 31 GB.
_QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "num_key_value_heads": 4,
    "num_hidden_layers": 24,
    "head_dim": 128,
    "vocab_size": 151936,
    "rope_theta": 1000000.0,
    "attention_bias": False,
}

# DeepSeek-V3's attention with a quarter of its heads. Its experts begin behind the last layer.
_DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "intermediate_size": 14336,
    "num_key_value_heads": 32,
    "num_hidden_layers": 32,
    "first_k_dense_replace": 32,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "rope_theta": 10000.0,
}

# Granite 4's layers, with attention in one of ten.
_GRANITE = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "intermediate_size": 8192,
    "shared_intermediate_size": 8192,
    "num_key_value_heads": 8,
    "num_hidden_layers": 40,
    "layer_types": ["attention" if layer % 10 == 5 else "mamba" for layer in range(40)],
    "mamba_n_heads": 128,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 256,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "position_embedding_type": "nope",
    "attention_multiplier": 128**-0.5,
}

# DeepSeek-V4-Flash's attention and width, with 16 of 43 layers and 16 of 256 experts. The first two layers
# have windows alone, the others compressed caches in turns.
_DEEPSEEK_V4 = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "num_hidden_layers": 16,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "sliding_window": 128,
    "compress_ratios": [0, 0, *[4, 128] * 7],
    "index_topk": 512,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_eps": 1e-6,
    "hc_sinkhorn_iters": 20,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "num_nextn_predict_layers": 0,
    "expert_dtype": "fp8",
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "scale_fmt": "ue8m0",
    },
}


@dataclass(frozen=True)
class ModelShape:
    model: Mapping[str, Any]
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def write(self, directory: Path) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps({**_COMMON, **self.model}))
        return directory


SHAPES = {
    "llama": ModelShape(_LLAMA),
    "qwen3-moe": ModelShape(_QWEN3_MOE),
    "mla": ModelShape(_DEEPSEEK),
    "deepseek-v4": ModelShape(_DEEPSEEK_V4, ["--kv-cache-dtype", "fp8"]),
    # Each request needs room for its state: 8 GiB hold 992. NixlConnector supports channels first only.
    "hybrid": ModelShape(_GRANITE, ["--max-num-seqs", "256"], {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}),
}
