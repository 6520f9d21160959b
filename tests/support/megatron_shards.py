"""Whole checkpoints, and their cuts into the chunks that Megatron's ranks have, by reshaping whole tensors.

Nothing here uses the mapping of kv_connector. Stand-ins of GPTModel have the names and shapes that
Megatron-Core 0.16 gives them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kv_connector.weights.mapping.geometry import Geometry, Parameter, Tensor, Write
from kv_connector.weights.mapping.megatron import MegatronRanks

Weights = Mapping[str, torch.Tensor]
MATRICES = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class MegatronMesh:
    """Parallelism of a trainer. ``stages``: the layers of each chunk, in the order of the model.

    Chunk c is on pipeline rank ``c % pp``. ``padded``: rows of the vocabulary. ``fused_norms``, ``grouped``:
    Transformer Engine's names of norms and of experts.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1  # with ep and etp: ranks of a stage are tp * dp
    stages: Sequence[range] = ()
    padded: int = 0
    fused_norms: bool = False
    grouped: bool = False

    @property
    def ranks(self) -> int:
        return self.pp * self.tp * self.dp


def small_config(architecture: str, **fields: Any) -> dict[str, Any]:
    """Returns a config.json of a small model."""
    mixtral = architecture == "MixtralForCausalLM"
    experts = {"num_local_experts": 4} if mixtral else {"num_experts": 4, "moe_intermediate_size": 8}
    return {
        "architectures": [architecture],
        "hidden_size": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "intermediate_size": 16,
        "vocab_size": 13,
        "num_hidden_layers": 2,
        "tie_word_embeddings": False,
        **(experts if mixtral or "Moe" in architecture else {}),
        **({"shared_expert_intermediate_size": 8} if architecture == "Qwen2MoeForCausalLM" else {}),
        **fields,
    }


def is_sparse(config: Mapping[str, Any], layer: int) -> bool:
    experts = "num_experts" in config or "num_local_experts" in config
    return experts and layer not in config.get("mlp_only_layers", ())


def whole_checkpoint(config: Mapping[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Draws a checkpoint whose values all differ."""
    (architecture,) = config["architectures"]
    hidden, head = config["hidden_size"], config["head_dim"]
    queries = config["num_attention_heads"] * head
    keys = config["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}

    def mlp(prefix: str, inner: int, names: Sequence[str] = MATRICES) -> None:
        gate, up, down = names
        shapes[f"{prefix}.{gate}.weight"] = shapes[f"{prefix}.{up}.weight"] = (inner, hidden)
        shapes[f"{prefix}.{down}.weight"] = (hidden, inner)

    for layer in range(config["num_hidden_layers"]):
        here = f"model.layers.{layer}"
        shapes[f"{here}.input_layernorm.weight"] = (hidden,)
        shapes[f"{here}.post_attention_layernorm.weight"] = (hidden,)
        for one, rows in (("q", queries), ("k", keys), ("v", keys)):
            shapes[f"{here}.self_attn.{one}_proj.weight"] = (rows, hidden)
            if "Qwen2" in architecture:
                shapes[f"{here}.self_attn.{one}_proj.bias"] = (rows,)
        if "Qwen3" in architecture:
            shapes[f"{here}.self_attn.q_norm.weight"] = shapes[f"{here}.self_attn.k_norm.weight"] = (head,)
        shapes[f"{here}.self_attn.o_proj.weight"] = (hidden, queries)
        if not is_sparse(config, layer):
            mlp(f"{here}.mlp", config["intermediate_size"])
        elif architecture == "MixtralForCausalLM":
            shapes[f"{here}.block_sparse_moe.gate.weight"] = (config["num_local_experts"], hidden)
            for expert in range(config["num_local_experts"]):
                place = f"{here}.block_sparse_moe.experts.{expert}"
                mlp(place, config["intermediate_size"], ("w1", "w3", "w2"))
        else:
            shapes[f"{here}.mlp.gate.weight"] = (config["num_experts"], hidden)
            for expert in range(config["num_experts"]):
                mlp(f"{here}.mlp.experts.{expert}", config["moe_intermediate_size"])
            if architecture == "Qwen2MoeForCausalLM":
                mlp(f"{here}.mlp.shared_expert", config["shared_expert_intermediate_size"])
                shapes[f"{here}.mlp.shared_expert_gate.weight"] = (1, hidden)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    sizes = [torch.Size(shape).numel() for shape in shapes.values()]
    values = torch.randperm(sum(sizes), generator=torch.Generator().manual_seed(seed)).float()
    parts = values.split(sizes)
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def ranks_of(mesh: MegatronMesh, rank: int) -> tuple[int, MegatronRanks]:
    """Returns the pipeline rank and the other ranks of a process, in Megatron's order."""
    pp, place = divmod(rank, mesh.tp * mesh.dp)
    of_experts = (place // mesh.etp % mesh.ep, mesh.ep, place % mesh.etp, mesh.etp)
    return pp, MegatronRanks(place % mesh.tp, mesh.tp, *of_experts)


def chunks_of(
    mesh: MegatronMesh, rank: int, config: Mapping[str, Any], weights: Weights
) -> list[torch.nn.Module]:
    """Returns the chunks of a rank, with copies of its parts of the weights."""
    pp, ranks = ranks_of(mesh, rank)
    stages = mesh.stages or [range(config["num_hidden_layers"])]
    return [
        _module(dict(_chunk(mesh, ranks, config, weights, stages, number)), stages[number])
        for number in range(pp, len(stages), mesh.pp)
    ]


def _module(parameters: Weights, layers: range) -> torch.nn.Module:
    root = torch.nn.Module()
    for name, value in parameters.items():
        *path, own = name.split(".")
        module = root
        for step in path:
            if step not in module._modules:
                module.add_module(step, torch.nn.Module())
            module = module.get_submodule(step)
        module.register_parameter(own, torch.nn.Parameter(value.clone()))
    for number, layer in enumerate(layers):
        root.get_submodule(f"decoder.layers.{number}").layer_number = layer + 1  # type: ignore[assignment]
    return root


def _chunk(
    mesh: MegatronMesh,
    ranks: MegatronRanks,
    config: Mapping[str, Any],
    weights: Weights,
    stages: Sequence[range],
    number: int,
) -> Iterator[tuple[str, torch.Tensor]]:
    first, last = number == 0, number == len(stages) - 1

    def of_vocabulary(name: str) -> torch.Tensor:
        whole = weights[name]
        padding = whole.new_full((mesh.padded - len(whole), whole.shape[1]), -1.0)
        return torch.cat([whole, padding]).chunk(mesh.tp)[ranks.tp_rank]

    if first:
        yield "embedding.word_embeddings.weight", of_vocabulary("model.embed_tokens.weight")
    for place, layer in enumerate(stages[number]):
        for name, value in _layer(mesh, ranks, config, weights, layer):
            yield f"decoder.layers.{place}.{name}", value
    if last:
        yield "decoder.final_layernorm.weight", weights["model.norm.weight"]
        if not config["tie_word_embeddings"]:
            yield "output_layer.weight", of_vocabulary("lm_head.weight")
        elif not first:
            yield "output_layer.weight", of_vocabulary("model.embed_tokens.weight")


def _layer(
    mesh: MegatronMesh, ranks: MegatronRanks, config: Mapping[str, Any], weights: Weights, layer: int
) -> Iterator[tuple[str, torch.Tensor]]:
    here = f"model.layers.{layer}"
    groups = config["num_key_value_heads"]

    def fused(kind: str) -> torch.Tensor:
        parts = [weights[f"{here}.self_attn.{one}_proj.{kind}"] for one in "qkv"]
        tail = parts[0].shape[1:]
        by_group = [part.reshape(groups, -1, *tail) for part in parts]
        return torch.cat(by_group, dim=1).reshape(-1, *tail).chunk(mesh.tp)[ranks.tp_rank]

    def mlp(prefix: str, names: Sequence[str], rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up, down = (weights[f"{prefix}.{name}.weight"] for name in names)
        fc1 = torch.cat([gate.chunk(size)[rank], up.chunk(size)[rank]])
        return fc1, down.chunk(size, dim=1)[rank]

    sparse = is_sparse(config, layer)
    norms = "self_attention.linear_qkv.layer_norm_weight" if mesh.fused_norms else "input_layernorm.weight"
    yield norms, weights[f"{here}.input_layernorm.weight"]
    yield (
        "self_attention.linear_proj.weight",
        weights[f"{here}.self_attn.o_proj.weight"].chunk(mesh.tp, 1)[ranks.tp_rank],
    )
    yield "self_attention.linear_qkv.weight", fused("weight")
    if f"{here}.self_attn.q_proj.bias" in weights:
        yield "self_attention.linear_qkv.bias", fused("bias")
    for one in "qk":
        if f"{here}.self_attn.{one}_norm.weight" in weights:
            norm = weights[f"{here}.self_attn.{one}_norm.weight"]
            yield f"self_attention.{one}_layernorm.weight", norm
    fused_here = mesh.fused_norms and not sparse
    norm_name = "mlp.linear_fc1.layer_norm_weight" if fused_here else "pre_mlp_layernorm.weight"
    yield norm_name, weights[f"{here}.post_attention_layernorm.weight"]
    if not sparse:
        fc1, fc2 = mlp(f"{here}.mlp", MATRICES, ranks.tp_rank, mesh.tp)
        yield "mlp.linear_fc1.weight", fc1
        yield "mlp.linear_fc2.weight", fc2
        return
    mixtral = "num_local_experts" in config
    place, names = (".block_sparse_moe", ("w1", "w3", "w2")) if mixtral else (".mlp", MATRICES)
    yield "mlp.router.weight", weights[f"{here}{place}.gate.weight"]
    experts = range(config["num_local_experts" if mixtral else "num_experts"])
    each = len(experts) // mesh.ep
    for local, expert in enumerate(experts[ranks.ep_rank * each :][:each]):
        both = mlp(f"{here}{place}.experts.{expert}", names, ranks.etp_rank, mesh.etp)
        for fc, value in zip(("fc1", "fc2"), both, strict=True):
            grouped = f"mlp.experts.linear_{fc}.weight{local}"
            yield grouped if mesh.grouped else f"mlp.experts.local_experts.{local}.linear_{fc}.weight", value
    if f"{here}.mlp.shared_expert_gate.weight" in weights:
        yield "mlp.shared_experts.gate_weight", weights[f"{here}.mlp.shared_expert_gate.weight"]
        fc1, fc2 = mlp(f"{here}.mlp.shared_expert", MATRICES, ranks.tp_rank, mesh.tp)
        yield "mlp.shared_experts.linear_fc1.weight", fc1
        yield "mlp.shared_experts.linear_fc2.weight", fc2


_BY_COLUMNS = ("o_proj.weight", "down_proj.weight", "w2.weight")
_WHOLE = ("norm.weight", "gate.weight")


def engine_cut(name: str, shape: Sequence[int], rank: int, ranks: int) -> tuple[slice, ...]:
    """Returns the part of a tensor that a worker of an engine loads."""
    if name.endswith(_WHOLE):
        return tuple(slice(0, size) for size in shape)
    cut = 1 if name.endswith(_BY_COLUMNS) else 0
    edges = [shape[cut] * one // ranks for one in (rank, rank + 1)]
    return tuple(slice(*edges) if d == cut else slice(0, size) for d, size in enumerate(shape))


def engine_loads(rank: int, ranks: int, tensors: Sequence[Tensor]) -> Geometry:
    """Returns the geometry of a worker that has a parameter for its part of each tensor."""
    parameters: list[Parameter] = []
    writes: list[Write] = []
    for number, tensor in enumerate(tensors):
        cut = engine_cut(tensor.name, tensor.shape, rank, ranks)
        extent = tuple(one.stop - one.start for one in cut)
        elements = torch.Size(extent).numel()
        if elements:
            strides = torch.empty(extent, device="meta").stride()
            writes.append(Write(number, len(parameters), tuple(s.start for s in cut), extent, 0, strides))
            parameters.append(Parameter(tensor.name, tensor.dtype, elements))
    return Geometry(tuple(parameters), tuple(writes), ())
