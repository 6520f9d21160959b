"""A small model with latent attention (MLA) that SGLang computes on a CPU: no experts, rotary embeddings by
YaRN."""

from __future__ import annotations

import json
from pathlib import Path

from kinds import SMALL, write
from transformers.models.deepseek_v2 import DeepseekV2Config

YARN = {
    "rope_type": "yarn",
    "factor": 2.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "rope_theta": 10000.0,
}
LAYERS = 3


def make_mla(directory: Path) -> Path:
    config = DeepseekV2Config(
        **SMALL | {"num_key_value_heads": 4},
        num_hidden_layers=LAYERS,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        first_k_dense_replace=LAYERS,
        topk_method="greedy",
        n_group=1,
        topk_group=1,
    )
    write(directory, config)
    # Fields that this version of transformers omits, or writes differently.
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_parameters": YARN, "moe_layer_freq": 1}))
    return directory
