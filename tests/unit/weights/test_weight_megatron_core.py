"""Megatron-Core's own GPTModel: transformers computes the same logits from the tensors that its ranks send.

The test needs Megatron-Core, and no GPU: `pip install --no-deps megatron-core==0.16.1`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_shards import small_config
from weight_trainer import RankProcesses

from kv_connector.weights.megatron import megatron_source
from kv_connector.weights.sources import ShardSource

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
)

RANKS = 4
PADDED_VOCABULARY = 104
CASES: list[tuple[dict[str, Any], dict[str, int]]] = [
    (small_config("LlamaForCausalLM"), {"tensor": 4}),  # more ranks than groups of heads
    (small_config("Qwen2ForCausalLM"), {"tensor": 2, "pipeline": 2, "virtual_pipeline": 2}),
    (small_config("Qwen2ForCausalLM"), {"tensor": 2}),
    (small_config("Qwen3ForCausalLM", tie_word_embeddings=True), {"tensor": 1}),
    (small_config("Qwen3MoeForCausalLM"), {"tensor": 2, "expert": 2, "expert_tensor": 2}),
    (small_config("Qwen2MoeForCausalLM"), {"tensor": 2, "expert": 4, "expert_tensor": 1}),
    (small_config("MixtralForCausalLM"), {"pipeline": 2, "expert": 2}),
    (small_config("MixtralForCausalLM"), {"tensor": 2, "expert": 1, "expert_tensor": 4}),
]


def completed(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a config.json whose model transformers can compute."""
    more = {
        "vocab_size": 100,
        "num_attention_heads": 4 if "Qwen2" in config["architectures"][0] else 8,
        "hidden_size": 32,
        "head_dim": 8,
        "num_hidden_layers": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "max_position_embeddings": 64,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    }
    return config | more


def main(told: Connection, store: str, rank: int, directory: str) -> None:
    """Runs a rank for each case. It reports the results."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=RANKS)
    without_cuda()
    from megatron.core import parallel_state

    for number, (config, mesh) in enumerate(CASES):
        parallel_state.initialize_model_parallel(
            **{f"{kind}_model_parallel_size": size for kind, size in mesh.items() if "_" not in kind},
            virtual_pipeline_model_parallel_size=mesh.get("virtual_pipeline"),
            expert_tensor_parallel_size=mesh.get("expert_tensor"),
        )
        try:
            told.send(result(completed(config), mesh, Path(directory) / f"{number}-{rank}"))
        except Exception:
            told.send(traceback.format_exc())
        parallel_state.destroy_model_parallel()


def result(config: dict[str, Any], mesh: dict[str, int], place: Path) -> str:
    chunks = make_chunks(config, mesh)
    if not save(megatron_source(chunks, config), config, place):
        return "no rank has some elements"
    if mesh.get("pipeline", 1) > 1:
        return "complete"
    return "the same" if same_logits(chunks[0], place) else "other logits"


def without_cuda() -> None:
    """Replaces what Megatron-Core calls of CUDA in a model that is made and computed on a CPU."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    random.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    moe_utils.te_general_gemm = None


def make_chunks(config: dict[str, Any], mesh: dict[str, int]) -> list[Any]:
    """Returns the chunks of this rank, with random weights that differ between layers, experts and ranks."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    (architecture,) = config["architectures"]
    experts = config.get("num_experts") or config.get("num_local_experts")
    shared = config.get("shared_expert_intermediate_size")
    settings = TransformerConfig(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        num_attention_heads=config["num_attention_heads"],
        num_query_groups=config["num_key_value_heads"],
        kv_channels=config["head_dim"],
        ffn_hidden_size=config["intermediate_size"],
        num_moe_experts=experts,
        moe_ffn_hidden_size=config.get("moe_intermediate_size", config["intermediate_size"])
        if experts
        else None,
        moe_shared_expert_intermediate_size=shared,
        moe_shared_expert_gate=bool(shared),
        moe_router_topk=2,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather",
        add_bias_linear=False,
        add_qkv_bias="Qwen2" in architecture,
        qk_layernorm="Qwen3" in architecture,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        layernorm_epsilon=config["rms_norm_eps"],
        tensor_model_parallel_size=mesh.get("tensor", 1),
        pipeline_model_parallel_size=mesh.get("pipeline", 1),
        virtual_pipeline_model_parallel_size=mesh.get("virtual_pipeline"),
        expert_model_parallel_size=mesh.get("expert", 1),
        expert_tensor_parallel_size=mesh.get("expert_tensor"),
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
    )
    spec = get_gpt_layer_local_spec(
        num_experts=experts,
        moe_grouped_gemm=False,
        qk_layernorm=settings.qk_layernorm,
        normalization="RMSNorm",
    )
    chunks = []
    for stage in range(mesh.get("virtual_pipeline", 1)):
        virtual = {"vp_stage": stage} if "virtual_pipeline" in mesh else {}
        chunk = GPTModel(
            settings,
            spec,
            vocab_size=PADDED_VOCABULARY,
            max_sequence_length=config["max_position_embeddings"],
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, **virtual),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, **virtual),
            share_embeddings_and_output_weights=config["tie_word_embeddings"],
            position_embedding_type="rope",
            rotary_base=config["rope_theta"],
            **virtual,
        )
        draw(chunk)
        chunks.append(chunk.eval())
    return chunks


def draw(chunk: torch.nn.Module) -> None:
    """Draws weights that replicas have alike."""
    from megatron.core import parallel_state

    for name, value in chunk.named_parameters():
        parts = name.split(".")
        layer = chunk.get_submodule(".".join(parts[:3])).layer_number if "layers" in parts else 0
        cut = getattr(value, "tensor_model_parallel", False)
        seed = [str(layer), *parts[3:], str(tuple(value.shape))]
        if "word_embeddings" in name or "output_layer" in name:
            seed = ["tied" if chunk.share_embeddings_and_output_weights else parts[-2]]
        if "experts" in parts:
            seed.append(f"expert {parallel_state.get_expert_model_parallel_rank()}")
            seed.append(f"part {parallel_state.get_expert_tensor_parallel_rank()}")
        elif cut or name.endswith("linear_qkv.bias"):
            seed.append(f"part {parallel_state.get_tensor_model_parallel_rank()}")
        number = sum(byte * 31**place for place, byte in enumerate("/".join(seed).encode())) % (1 << 62)
        generator = torch.Generator().manual_seed(number)
        drawn = torch.randn(value.shape, generator=generator) * 0.1
        value.data = drawn + 1 if "norm" in name else drawn


def save(source: ShardSource, config: dict[str, Any], place: Path) -> bool:
    """Saves the checkpoint that all ranks have together. Returns whether each element is there."""
    from safetensors.torch import save_file
    from transformers import AutoConfig

    mine = [(held.shard, held.local().clone()) for held in source.held()]
    tensors = source.tensors()
    whole = [torch.full(tensor.shape, float("nan")) for tensor in tensors]
    for of_rank in source.exchange(mine):
        for shard, part in of_rank:  # type: ignore[attr-defined]
            box = shard.box
            span = tuple(slice(a, a + n) for a, n in zip(box.start, box.extent, strict=True))
            whole[shard.tensor][span] = part
    place.mkdir()
    named = {tensor.name: value for tensor, value in zip(tensors, whole, strict=True)}
    save_file(named, place / "model.safetensors", metadata={"format": "pt"})
    (architecture,) = config["architectures"]
    kind = architecture.removesuffix("ForCausalLM").lower().replace("moe", "_moe")
    AutoConfig.for_model(kind, **config).save_pretrained(place)
    return not any(value.isnan().any() for value in whole)


def same_logits(model: torch.nn.Module, place: Path) -> bool:
    from megatron.core import parallel_state
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(
        place, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens = torch.randint(0, 100, (1, 24), generator=torch.Generator().manual_seed(1))
    future = torch.ones(24, 24).triu(1).bool()[None, None]
    with torch.no_grad():
        part = model(tokens, torch.arange(24)[None], future).contiguous()
        group = parallel_state.get_tensor_model_parallel_group()
        parts = [torch.empty_like(part) for _ in range(group.size())]
        torch.distributed.all_gather(parts, part, group=group)
        found = torch.cat(parts, -1)[..., :100]
        expected = reference(tokens).logits
    return bool(torch.allclose(found, expected, rtol=0, atol=1e-5))


def test_transformers_computes_the_logits_of_megatron_core_from_what_its_ranks_send(tmp_path: Path) -> None:
    """Logits of pipelines are not compared: only that their ranks have each element."""
    with RankProcesses(main, tmp_path, RANKS, str(tmp_path)) as ranks:
        for config, mesh in CASES:
            found = [ranks.heard(rank) for rank in range(RANKS)]
            expected = "complete" if "pipeline" in mesh else "the same"
            assert found == [expected] * RANKS, (config["architectures"], mesh)
