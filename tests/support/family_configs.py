"""Configurations of the newest model families, with few layers and few experts, for families.py.

Widths that a kernel fixes are those of the published model. Everything else is small.
"""

from typing import Any

from kv_connector.lab.model import BOS, EOS, PAD, VOCABULARY

BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
}
EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "first_k_dense_replace": 1,
}
FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "scale_fmt": "ue8m0",
}
LATENT: dict[str, Any] = {
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": 256,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
INDEXER = {"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 32}
YARN = {"rope_type": "yarn", "type": "yarn", "factor": 4, "original_max_position_embeddings": 2048}


def config(architecture: str, model_type: str, layers: int, **more: Any) -> dict[str, Any]:
    """Returns the content of a config.json."""
    return (
        BASE | {"architectures": [architecture], "model_type": model_type, "num_hidden_layers": layers} | more
    )


DEEPSEEK_V4 = config(
    "DeepseekV4ForCausalLM",
    "deepseek_v4",
    4,
    **EXPERTS
    | INDEXER
    | {
        "index_topk": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 256,
        "o_lora_rank": 128,
        "o_groups": 4,
        "sliding_window": 128,
        "compress_ratios": [0, 4, 128, 4],
        "num_hash_layers": 1,
        "scoring_func": "sqrtsoftplus",
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "hc_mult": 4,
        "hc_eps": 1e-6,
        "hc_sinkhorn_iters": 20,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "rope_scaling": YARN | {"beta_fast": 32, "beta_slow": 1},
        "num_nextn_predict_layers": 0,
        "expert_dtype": "fp8",
        "quantization_config": FP8,
    },
)
DEEPSEEK_V32 = config(
    "DeepseekV32ForCausalLM",
    "deepseek_v32",
    3,
    **EXPERTS | LATENT | INDEXER,
    rope_theta=10000,
    num_nextn_predict_layers=0,
)
GLM5_NEXT = config(
    "Glm5NextForCausalLM",
    "glm5_next_text",
    4,
    **EXPERTS | LATENT | INDEXER | {"qk_rope_head_dim": 0, "qk_nope_head_dim": 256, "v_head_dim": 256},
    mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
    linear_num_heads=8,
    linear_head_dim=128,
    index_kpool=16,
    mla_use_nope=True,
    indexer_rope_interleave=True,
    mhc=True,
    hc_mult=4,
    num_nextn_predict_layers=0,
)
QWEN4_EXP = config(
    "Qwen4ExpForCausalLM",
    "qwen4_exp_text",
    4,
    layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=256,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=256,
    shared_expert_intermediate_size=256,
    hc_lowrank=64,
    ple_layer_ids=[1],
    ple_embed_dim=512,
    ngram_vocab_size_base=1000,
    split_ngram_parts=8,
    indexer_n_heads=4,
    indexer_kv_heads=1,
    indexer_head_dim=128,
    indexer_budget=2048,
    indexer_compress_ratio=4,
    output_gate_type="silu",
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
)
KIMI_LINEAR = config(
    "KimiLinearForCausalLM",
    "kimi_linear",
    4,
    num_attention_heads=8,
    num_key_value_heads=8,
    head_dim=128,
    kv_lora_rank=512,
    q_lora_rank=None,
    qk_rope_head_dim=64,
    qk_nope_head_dim=128,
    v_head_dim=128,
    mla_use_nope=True,
    num_experts=8,
    num_experts_per_token=2,
    moe_intermediate_size=256,
    num_shared_experts=1,
    first_k_dense_replace=1,
    moe_layer_freq=1,
    num_expert_group=1,
    topk_group=1,
    moe_renormalize=True,
    moe_router_activation_func="sigmoid",
    routed_scaling_factor=2.4,
    use_grouped_topk=True,
    rope_theta=10000.0,
    linear_attn_config={
        "full_attn_layers": [4],
        "kda_layers": [1, 2, 3],
        "head_dim": 128,
        "num_heads": 8,
        "short_conv_kernel_size": 4,
    },
)
MAMBA = config(
    "MambaForCausalLM",
    "mamba",
    4,
    state_size=16,
    expand=2,
    conv_kernel=4,
    time_step_rank=32,
    use_bias=False,
    use_conv_bias=True,
    layer_norm_epsilon=1e-5,
)
JAMBA = config(
    "JambaForCausalLM",
    "jamba",
    4,
    num_attention_heads=8,
    num_key_value_heads=4,
    attn_layer_period=2,
    attn_layer_offset=1,
    expert_layer_period=2,
    expert_layer_offset=1,
    num_experts=4,
    num_experts_per_tok=2,
    mamba_d_state=16,
    mamba_d_conv=4,
    mamba_expand=2,
    mamba_dt_rank=32,
)
OLMO_HYBRID = config(
    "OlmoHybridForCausalLM",
    "olmo_hybrid",
    4,
    num_attention_heads=8,
    num_key_value_heads=8,
    linear_num_key_heads=8,
    linear_num_value_heads=8,
    linear_key_head_dim=64,
    linear_value_head_dim=128,
    layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    rope_theta=10000.0,
)
_MINIMAX_M3_TEXT = config(
    "MiniMaxM3SparseForCausalLM",
    "minimax_m3_text",
    4,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=128,
    intermediate_size=256,
    dense_intermediate_size=1024,
    shared_intermediate_size=256,
    num_local_experts=8,
    num_experts_per_tok=2,
    hidden_act="swigluoai",
    moe_layer_freq=[0, 1, 1, 1],
    sparse_attention_config={
        "use_sparse_attention": True,
        "sparse_index_dim": 128,
        "sparse_num_index_heads": 4,
        "sparse_topk_blocks": 4,
        "sparse_block_size": 128,
        "sparse_disable_index_value": [0, 1, 1, 1],
        "sparse_score_type": "max",
        "sparse_init_block": 0,
        "sparse_local_block": 1,
        "sparse_attention_freq": [0, 1, 1, 1],
    },
)
# vLLM knows this configuration only as the text part of the model for pictures.
MINIMAX_M3 = {
    "architectures": ["MiniMaxM3SparseForCausalLM"],
    "model_type": "minimax_m3_vl",
    "torch_dtype": "bfloat16",
    "text_config": _MINIMAX_M3_TEXT,
}
