"""The time of a trainer's rank to plan which rank writes what, for docs/benchmarks/2026-11-26-weights.md.

Names and shapes are those of a model of experts (default: Qwen3-235B-A22B). It is sharded by rows over
--senders ranks (FSDP2), for an engine of --receivers ranks with experts and heads divided between them. Every
rank plans by itself, on one core. Seconds are CPU seconds. Needs neither a GPU nor an engine.
"""
# ruff: noqa: T201  (its output is a table)

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Sequence

from gpu_trainer import weights_of

from kv_connector.weights.mapping.geometry import Geometry, Parameter, Tensor, Write
from kv_connector.weights.mapping.plan import Box, TensorShard, make_plan

# Sizes of Qwen3-235B-A22B.
SIZES = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
}


def shards(tensors: Sequence[Tensor], rank: int, ranks: int) -> list[TensorShard]:
    """Returns the rows of a rank, as torch's chunk() distributes them."""
    held = []
    for number, tensor in enumerate(tensors):
        rows, *rest = tensor.shape
        most = -(-rows // ranks)
        begin = min(rank * most, rows)
        box = Box((begin, *[0] * len(rest)), (min(most, rows - begin), *rest))
        held.append(TensorShard(number, box))
    return held


def loads(tensors: Sequence[Tensor], rank: int, ranks: int, experts: int) -> Geometry:
    """Returns a parameter for each tensor of which the rank has a part: its experts, its heads, its rows."""
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
            head = SIZES["head_dim"]
            start[0], extent[0] = rank * SIZES["num_key_value_heads"] // ranks * head, head
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
    config = SIZES | {"num_hidden_layers": plan.layers, "num_experts": plan.experts}
    tensors = [Tensor(name, "bfloat16", shape) for name, shape in weights_of(config)]
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
