"""Parameters of Megatron-Core's GPTModel as parts of a checkpoint's tensors.

Megatron fuses tensors of a checkpoint and cuts them over ranks. Queries, keys and values lie in one matrix,
in turn for each group of query heads. Gate and up lie in one matrix, in turn for each rank. Nothing here
needs torch or Megatron-Core. Names of parameters are those of Megatron-Core 0.16.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kv_connector.weights.mapping.geometry import Index
from kv_connector.weights.mapping.plan import Box


class MegatronError(ValueError):
    """A parameter or a config that this mapping does not know. The message names it and what to do."""


@dataclass(frozen=True)
class MegatronRanks:
    """The place of a process in Megatron's groups. Experts have groups of their own.

    Pipeline ranks are not needed: each layer knows its number.
    """

    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    etp_rank: int = 0  # tensor parallelism of the experts; Megatron's default size is tp_size
    etp_size: int = 1

    def __post_init__(self) -> None:
        for kind in ("tp", "ep", "etp"):
            rank, size = getattr(self, f"{kind}_rank"), getattr(self, f"{kind}_size")
            if not 0 <= rank < size:
                raise MegatronError(f"{kind}_rank is {rank} of {size}. Give 0 to {kind}_size - 1.")


@dataclass(frozen=True)
class Region:
    """A part of a checkpoint's tensor in a parameter, where it begins at ``at`` and has the box's extent."""

    tensor: str
    box: Box
    at: Index


@dataclass(frozen=True)
class _Family:
    """Tensors that the checkpoints of an architecture have beside those of a Llama."""

    experts: str = ""  # prefix of the names of experts and router, in a layer
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # of an expert
    qkv_bias: bool = False
    qk_norm: bool = False
    shared: bool = False


_MIXTRAL = "block_sparse_moe."
FAMILIES: Mapping[str, _Family] = {
    "LlamaForCausalLM": _Family(),
    "MixtralForCausalLM": _Family(_MIXTRAL, ("w1", "w3", "w2")),
    "Qwen2ForCausalLM": _Family(qkv_bias=True),
    "Qwen2MoeForCausalLM": _Family("mlp.", qkv_bias=True, shared=True),
    "Qwen3ForCausalLM": _Family(qk_norm=True),
    "Qwen3MoeForCausalLM": _Family("mlp.", qk_norm=True),
}

_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(?P<a>\d+)\.linear_(?P<fc>fc[12])\.weight"
    r"|linear_(?P<grouped>fc[12])\.weight(?P<b>\d+))"
)
_LAYER = re.compile(r"decoder\.layers\.\d+\.")
# Parameters that each rank has whole, and their names in a checkpoint's layer. Megatron fuses a norm into the
# matrix behind it if Transformer Engine computes both.
_WHOLE = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight",
}


class MegatronCheckpoint:
    """The tensors of a checkpoint, and where Megatron has them."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """``config``: the content of the checkpoint's config.json.

        Raises MegatronError for an architecture that is not in FAMILIES, and for a missing or invalid field.
        """
        self._architecture = _architecture(config)
        self._family = FAMILIES[self._architecture]
        self._config = config
        for name in ("attention_bias", "mlp_bias"):
            if config.get(name):
                raise MegatronError(
                    f"{name} is true in the config of a {self._architecture}, and the source of Megatron's "
                    "shards knows no such biases. Gather the weights by Megatron-Bridge"
                )
        self._hidden = self._count("hidden_size")
        heads = self._count("num_attention_heads")
        self._groups = self._count("num_key_value_heads", heads)
        if heads % self._groups:
            raise MegatronError(f"num_attention_heads {heads} is not a multiple of {self._groups} KV heads")
        self._heads_per_group = heads // self._groups
        self._head = self._count("head_dim", self._hidden // heads)
        self._layers = self._count("num_hidden_layers")
        self._experts = 0
        if self._family.experts:
            self._experts = self._count("num_local_experts" if self._mixtral else "num_experts")
        self.tied = bool(config.get("tie_word_embeddings", False))
        self.shapes: Mapping[str, Index] = self._all_shapes()
        """Shapes of all tensors, by name, in the same order on all ranks."""

    @property
    def _mixtral(self) -> bool:
        return self._family.experts == _MIXTRAL

    def _count(self, field: str, default: int | None = None) -> int:
        value = self._config.get(field)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise MegatronError(
                f"{field} is {value!r} in the config. Pass the content of the checkpoint's config.json"
            )
        return value

    def _is_sparse(self, layer: int) -> bool:
        """Returns whether a layer has experts."""
        config = self._config
        step = int(config.get("decoder_sparse_step") or 1)
        dense = config.get("mlp_only_layers") or ()
        return bool(self._experts) and layer not in dense and (layer + 1) % step == 0

    def _all_shapes(self) -> dict[str, Index]:
        hidden = self._hidden
        vocabulary = (self._count("vocab_size"), hidden)
        shapes: dict[str, Index] = {"model.embed_tokens.weight": vocabulary}
        for layer in range(self._layers):
            shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in self._of_layer(layer)}
        shapes["model.norm.weight"] = (hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = vocabulary
        return shapes

    def _of_layer(self, layer: int) -> list[tuple[str, Index]]:
        hidden, family = self._hidden, self._family
        rows = {"q": self._groups * self._heads_per_group * self._head}
        rows["k"] = rows["v"] = self._groups * self._head
        found: list[tuple[str, Index]] = [("input_layernorm.weight", (hidden,))]
        for one, size in rows.items():
            found.append((f"self_attn.{one}_proj.weight", (size, hidden)))
            if family.qkv_bias:
                found.append((f"self_attn.{one}_proj.bias", (size,)))
            if family.qk_norm and one != "v":
                found.append((f"self_attn.{one}_norm.weight", (self._head,)))
        found.append(("self_attn.o_proj.weight", (hidden, rows["q"])))
        found.append(("post_attention_layernorm.weight", (hidden,)))
        if not self._is_sparse(layer):
            return found + self._mlp("mlp.", ("gate_proj", "up_proj", "down_proj"), "intermediate_size")
        found.append((f"{family.experts}gate.weight", (self._experts, hidden)))
        field = "intermediate_size" if self._mixtral else "moe_intermediate_size"
        for expert in range(self._experts):
            found += self._mlp(f"{family.experts}experts.{expert}.", family.matrices, field)
        if family.shared:
            field = "shared_expert_intermediate_size"
            found += self._mlp("mlp.shared_expert.", ("gate_proj", "up_proj", "down_proj"), field)
            found.append(("mlp.shared_expert_gate.weight", (1, hidden)))
        return found

    def _mlp(self, prefix: str, names: tuple[str, str, str], field: str) -> list[tuple[str, Index]]:
        gate, up, down = names
        wide, inner = self._hidden, self._count(field)
        return [
            (f"{prefix}{gate}.weight", (inner, wide)),
            (f"{prefix}{up}.weight", (inner, wide)),
            (f"{prefix}{down}.weight", (wide, inner)),
        ]

    def regions(self, name: str, shape: Index, layer: int | None, ranks: MegatronRanks) -> list[Region]:
        """Returns the parts of the checkpoint's tensors that a parameter of a rank has.

        ``name``: in ``named_parameters()``. ``layer``: of a layer's parameter, its number in the whole model
        from 0 on. Raises MegatronError for a name or a shape that the config does not explain.
        """
        found, expected = self._cut(name, shape, layer, ranks)
        if shape != expected:
            raise MegatronError(
                f"{name} has the shape {list(shape)} and should have {list(expected)} by the config and "
                f"{ranks}. Pass the config of this model, and the ranks of this process"
            )
        return found

    def _cut(
        self, name: str, shape: Index, layer: int | None, ranks: MegatronRanks
    ) -> tuple[list[Region], Index]:
        """Returns the regions, and the shape that the parameter should have."""
        tp = ranks.tp_rank, ranks.tp_size
        if layer is None:
            if name == "embedding.word_embeddings.weight":
                return self._vocabulary(name, "model.embed_tokens.weight", shape, ranks)
            if name == "output_layer.weight":
                # The last pipeline rank of tied weights has a copy of the embeddings.
                tensor = "model.embed_tokens.weight" if self.tied else "lm_head.weight"
                return self._vocabulary(name, tensor, shape, ranks)
            if name == "decoder.final_layernorm.weight":
                return self._rows(name, [("model.norm.weight", 0, self._hidden)])
            raise self._unknown(name)
        if not 0 <= layer < self._layers:
            raise MegatronError(
                f"{name} belongs to layer {layer}, and the config has layers 0 to {self._layers - 1}"
            )
        here, own = f"model.layers.{layer}.", _LAYER.sub("", name, count=1)
        if own in _WHOLE:
            tensor = here + _WHOLE[own]
            return self._rows(name, [(tensor, 0, self._size(name, tensor)[0])])
        match own:
            case "self_attention.linear_qkv.weight" | "self_attention.linear_qkv.bias":
                return self._qkv(name, f"{here}self_attn.", own.rpartition(".")[2], *tp)
            case "self_attention.linear_proj.weight":
                return self._columns(name, f"{here}self_attn.o_proj.weight", *tp)
            case "mlp.router.weight":
                return self._rows(name, [(f"{here}{self._family.experts}gate.weight", 0, self._experts)])
            case "mlp.linear_fc1.weight":
                return self._gated(name, f"{here}mlp.gate_proj.weight", f"{here}mlp.up_proj.weight", *tp)
            case "mlp.linear_fc2.weight":
                return self._columns(name, f"{here}mlp.down_proj.weight", *tp)
            case "mlp.shared_experts.linear_fc1.weight":
                gate, up = (f"{here}mlp.shared_expert.{one}_proj.weight" for one in ("gate", "up"))
                return self._gated(name, gate, up, *tp)
            case "mlp.shared_experts.linear_fc2.weight":
                return self._columns(name, f"{here}mlp.shared_expert.down_proj.weight", *tp)
        if expert := _EXPERT.fullmatch(own):
            number = int(expert["a"] or expert["b"])
            each, rest = divmod(self._experts, ranks.ep_size)
            if rest or number >= each:
                raise MegatronError(
                    f"{name} is expert {number} of rank {ranks.ep_rank}, and the config has {self._experts} "
                    f"experts for {ranks.ep_size} expert-parallel ranks"
                )
            prefix = f"{here}{self._family.experts}experts.{ranks.ep_rank * each + number}."
            gate, up, down = (f"{prefix}{one}.weight" for one in self._family.matrices)
            etp = ranks.etp_rank, ranks.etp_size
            if (expert["fc"] or expert["grouped"]) == "fc1":
                return self._gated(name, gate, up, *etp)
            return self._columns(name, down, *etp)
        raise self._unknown(name)

    def _unknown(self, name: str) -> MegatronError:
        return MegatronError(
            f"the source of Megatron's shards knows no {name} of a {self._architecture} with this config. "
            "Pass the config of this model, or gather the weights by Megatron-Bridge"
        )

    def _size(self, name: str, tensor: str) -> Index:
        """Returns the shape of a tensor. Raises MegatronError if the checkpoint does not have it."""
        if tensor not in self.shapes:
            raise self._unknown(name)
        return self.shapes[tensor]

    def _share(self, name: str, size: int, ranks: int) -> int:
        """Returns the rows or columns of each rank."""
        if size % ranks:
            raise MegatronError(f"{name} cannot be cut over {ranks} ranks: {size} is not a multiple of that")
        return size // ranks

    def _rows(
        self, name: str, parts: Sequence[tuple[str, int, int]], first: int = 0, count: int | None = None
    ) -> tuple[list[Region], Index]:
        """Cuts ``count`` rows from ``first`` on out of these parts, which lie one after another.

        A part is a tensor, its first row, and a number of rows. Rows behind the last part are padding.
        """
        regions: list[Region] = []
        tail: Index = ()
        place = 0
        for tensor, start, rows in parts:
            tail = self._size(name, tensor)[1:]
            begin = max(first, place)
            end = place + rows if count is None else min(first + count, place + rows)
            if begin < end:
                zeros = (0,) * len(tail)
                box = Box((start + begin - place, *zeros), (end - begin, *tail))
                regions.append(Region(tensor, box, (begin - first, *zeros)))
            place += rows
        return regions, (place if count is None else count, *tail)

    def _vocabulary(
        self, name: str, tensor: str, shape: Index, ranks: MegatronRanks
    ) -> tuple[list[Region], Index]:
        """Cuts the rows of a vocabulary, which Megatron pads by a number of rows that it chooses."""
        size = self._size(name, tensor)[0]
        rows = shape[0] if shape else 0
        if rows * ranks.tp_size < size:
            raise MegatronError(
                f"{name} has {rows} rows on each of {ranks.tp_size} tensor-parallel ranks, and the config "
                f"has a vocabulary of {size}. Pass the config of this model, and the ranks of this process"
            )
        return self._rows(name, [(tensor, 0, size)], ranks.tp_rank * rows, rows)

    def _qkv(self, name: str, prefix: str, kind: str, rank: int, ranks: int) -> tuple[list[Region], Index]:
        """Cuts the fused rows. A cut may lie inside a group: with fewer groups than ranks it does."""
        q, k, v = (f"{prefix}{one}_proj.{kind}" for one in "qkv")
        queries, head = self._heads_per_group * self._head, self._head
        parts: list[tuple[str, int, int]] = []
        for group in range(self._groups):
            parts += [(q, group * queries, queries), (k, group * head, head), (v, group * head, head)]
        rows = self._share(name, self._groups * (queries + 2 * head), ranks)
        return self._rows(name, parts, rank * rows, rows)

    def _gated(self, name: str, gate: str, up: str, rank: int, ranks: int) -> tuple[list[Region], Index]:
        rows = self._share(name, self._size(name, gate)[0], ranks)
        return self._rows(name, [(gate, rank * rows, rows), (up, rank * rows, rows)])

    def _columns(self, name: str, tensor: str, rank: int, ranks: int) -> tuple[list[Region], Index]:
        rows, width = self._size(name, tensor)
        columns = self._share(name, width, ranks)
        region = Region(tensor, Box((0, rank * columns), (rows, columns)), (0, 0))
        return [region], (rows, columns)


def _architecture(config: Mapping[str, Any]) -> str:
    """Returns the architecture of a config. Raises MegatronError if it is not supported."""
    found = config.get("architectures") or []
    if len(found) != 1 or found[0] not in FAMILIES:
        raise MegatronError(
            f"the source of Megatron's shards does not support the architectures {found!r}. It supports "
            f"{', '.join(FAMILIES)}. Gather the weights of other models by Megatron-Bridge"
        )
    return str(found[0])
