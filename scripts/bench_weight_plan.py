"""How long a rank of a trainer takes to plan who writes what, for docs/performance.md.

Names and shapes are those of a model of experts (default: Qwen3-235B-A22B), sharded by rows over
--senders ranks (FSDP2), for an engine of --receivers ranks with experts and heads divided between them. Every
rank plans by itself, on one core; seconds are a processor's. Needs neither a GPU nor an engine.
"""
# ruff: noqa: T201  (its output is a table)

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Iterator, Sequence

from kv_connector.weights.geometry import Geometry, Parameter, Tensor, Write
from kv_connector.weights.plan import Box, Shard, make_plan

HIDDEN, HEADS, KV_HEADS, HEAD, INNER, VOCABULARY = 4096, 64, 4, 128, 1536, 151936


def names(layers: int, experts: int) -> Iterator[Tensor]:
    def one(name: str, *shape: int) -> Tensor:
        return Tensor(name, "bfloat16", shape)

    yield one("model.embed_tokens.weight", VOCABULARY, HIDDEN)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        yield one(f"{prefix}.self_attn.q_proj.weight", HEADS * HEAD, HIDDEN)
        yield one(f"{prefix}.self_attn.k_proj.weight", KV_HEADS * HEAD, HIDDEN)
        yield one(f"{prefix}.self_attn.v_proj.weight", KV_HEADS * HEAD, HIDDEN)
        yield one(f"{prefix}.self_attn.o_proj.weight", HIDDEN, HEADS * HEAD)
        yield one(f"{prefix}.self_attn.q_norm.weight", HEAD)
        yield one(f"{prefix}.self_attn.k_norm.weight", HEAD)
        yield one(f"{prefix}.input_layernorm.weight", HIDDEN)
        yield one(f"{prefix}.post_attention_layernorm.weight", HIDDEN)
        yield one(f"{prefix}.mlp.gate.weight", experts, HIDDEN)
        for expert in range(experts):
            yield one(f"{prefix}.mlp.experts.{expert}.gate_proj.weight", INNER, HIDDEN)
            yield one(f"{prefix}.mlp.experts.{expert}.up_proj.weight", INNER, HIDDEN)
            yield one(f"{prefix}.mlp.experts.{expert}.down_proj.weight", HIDDEN, INNER)
    yield one("model.norm.weight", HIDDEN)
    yield one("lm_head.weight", VOCABULARY, HIDDEN)


def shards(tensors: Sequence[Tensor], rank: int, ranks: int) -> list[Shard]:
    """Rows, as torch's chunk() deals them out."""
    held = []
    for number, tensor in enumerate(tensors):
        rows, *rest = tensor.shape
        most = -(-rows // ranks)
        begin = min(rank * most, rows)
        box = Box((begin, *[0] * len(rest)), (min(most, rows - begin), *rest))
        held.append(Shard(number, box))
    return held


def loads(tensors: Sequence[Tensor], rank: int, ranks: int, experts: int) -> Geometry:
    """A parameter for each tensor of which the rank has something: its experts, its heads, its rows."""
    parameters: list[Parameter] = []
    writes: list[Write] = []
    for number, tensor in enumerate(tensors):
        start, extent = [0] * len(tensor.shape), list(tensor.shape)
        parts = tensor.name.split(".")
        if "experts" in parts:
            if int(parts[-3]) * ranks // experts != rank:
                continue
        elif parts[-2] in ("q_proj", "embed_tokens", "lm_head"):
            extent[0] //= ranks
            start[0] = rank * extent[0]
        elif parts[-2] in ("k_proj", "v_proj"):
            start[0], extent[0] = rank * KV_HEADS // ranks * HEAD, HEAD
        elif parts[-2] == "o_proj":
            extent[1] //= ranks
            start[1] = rank * extent[1]
        strides = (extent[1], 1) if len(extent) == 2 else (1,)
        elements = extent[0] * strides[0]
        writes.append(Write(number, len(parameters), tuple(start), tuple(extent), 0, strides))
        parameters.append(Parameter(tensor.name, "bfloat16", elements))
    return Geometry(tuple(parameters), tuple(writes), ())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=94)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--senders", type=int, default=16)
    parser.add_argument("--receivers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    plan = parser.parse_args()
    tensors = list(names(plan.layers, plan.experts))
    senders = [shards(tensors, rank, plan.senders) for rank in range(plan.senders)]
    receivers = [loads(tensors, rank, plan.receivers, plan.experts) for rank in range(plan.receivers)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(plan.rounds):
        begin = time.process_time()
        made = make_plan(tensors, senders, receivers, 0)
        seconds = time.process_time() - begin
        pieces = sum(len(pieces) for pieces in made.pieces)
        more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        print(f"{len(tensors)} names, {pieces} pieces: {seconds:.2f} s, {more / 1024:.0f} MiB", flush=True)


if __name__ == "__main__":
    main()
