"""The pairs of P and D that are tested, and what each must show. docs/compatibility.md names them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from kinds import MLA

from kv_connector.lab.cluster import Role


@dataclass(frozen=True)
class Side:
    """One engine: vLLM's flags, separated by spaces. `@llama` stands for the directory of that model of
    kinds.py."""

    flags: str = ""
    block: int = 32
    chunk: int = 256
    """Tokens per step. Chunks of P end inside blocks, except for models with recurrent states."""
    role: Role | None = None

    def words(self) -> list[str]:
        return self.flags.split()


@dataclass(frozen=True)
class Case:
    name: str
    model: str
    prefill: Side = Side(chunk=200)
    decode: Side = Side()
    alone: str | None = None
    """Flags of the single engine, if they are not D's. Several cases then share its answers."""
    dtype: str = "float32"
    caching: bool = True
    """Whether prefix caching is on."""
    shifted: bool = False
    """Whether a kernel decodes differently than it prefills. The single engine's first token then becomes the
    last token of the prompt for P and D. The single engine has decoded the rest from there, as D does."""
    body: Mapping[str, Any] = field(default_factory=dict)
    """Fields of every request."""
    more: tuple[Mapping[str, Any], ...] = ()
    """Fields of further requests, one request each."""
    drafts: bool = False
    """Whether D's drafter must be right as often as the single engine's."""
    pool: int = 0
    """Blocks of D, if they must not suffice for all its requests, so that vLLM preempts some. The longest
    request needs a few blocks less than this."""
    crowd: tuple[Mapping[str, Any], ...] = ({},)
    """Fields of these requests, in turn."""
    connector: str = "WriteImmConnector"
    tier: str = "ExampleConnector"
    """The other connector, if ``connector`` is MultiConnector."""
    tier_first: bool = False
    """Whether MultiConnector has the tier as its first connector."""
    shortest: int = 1
    """Tokens of the shortest prompt that a single engine supports."""
    torchvision: bool = False
    """Whether vLLM imports torchvision for the model: see no_torchvision.py."""
    environment: Mapping[str, str] = field(default_factory=dict)


def flags(text: str, **more: Any) -> dict[str, Any]:
    """Returns a case's arguments with these flags on both sides."""
    return {"prefill": Side(text, chunk=200, **more), "decode": Side(text, **more)}


def whole() -> dict[str, Any]:
    """Returns a case's arguments for prompts in one step on both sides."""
    return {"prefill": Side(chunk=1024), "decode": Side(chunk=1024)}


def pair(prefill: str = "", decode: str = "", blocks: tuple[int, int] = (32, 32)) -> dict[str, Any]:
    """Returns a case's arguments with flags for P and D. Their tokens must be those of one engine without
    flags."""
    return {
        "prefill": Side(prefill, chunk=200, block=blocks[0]),
        "decode": Side(decode, block=blocks[1]),
        "alone": "",
    }


TP2 = "--tensor-parallel-size 2"
DP2 = "--data-parallel-size 2"
# A later pipeline stage needs the warm-up run that --enforce-eager leaves out.
PP2 = '--pipeline-parallel-size 2 --no-enforce-eager --compilation-config {"mode":1,"backend":"eager"}'
FP8 = "--kv-cache-dtype fp8"


def left_out(*flags: str) -> str:
    """Returns why this machine cannot run an engine with these flags; empty if it can."""
    if any(FP8 in one for one in flags) and not torch.cpu._is_avx512_supported():
        return "vLLM's fp8 KV cache on CPUs needs AVX-512"
    if any(MTP in one for one in flags) and torch.cpu._is_amx_tile_supported():
        return "vLLM's kernels for processors with AMX refuse this drafter's weights in float32"
    return ""


NGRAM = '--speculative-config {"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":3}'
EAGLE = '--speculative-config {"method":"eagle","model":"@eagle","num_speculative_tokens":3}'
EAGLE3 = '--speculative-config {"method":"eagle3","model":"@eagle3","num_speculative_tokens":3}'
MTP = '--speculative-config {"method":"mtp","num_speculative_tokens":2}'
DRAFT_MODEL = '--speculative-config {"method":"draft_model","model":"@llama","num_speculative_tokens":3}'
LORA = "--enable-lora --max-lora-rank 8 --lora-modules adapter=@adapter"
PRIORITY = "--scheduling-policy priority"
PRIORITIES = tuple({"priority": priority} for priority in (2, 0, 1))

SAMPLES = {"n": 3, "temperature": 1.0, "seed": 7}
STRUCTURES = (
    {"structured_outputs": {"regex": "[a-f]{6}-[0-9]{6}"}},
    {"structured_outputs": {"choice": ["yes, of course", "no, never"]}},
    {"structured_outputs": {"json": {"type": "object", "properties": {"a": {"type": "boolean"}}}}},
)


def latent(model: str, prefill: str = "", decode: str = "", alone: str = "") -> dict[str, Any]:
    """Returns a case's arguments for MLA. vLLM's CPU kernel supports blocks of 16 tokens, whole prompts and
    no prefix caching."""
    return {
        "model": model,
        "prefill": Side(f"{MLA} {prefill}", block=16, chunk=1024),
        "decode": Side(f"{MLA} {decode}", block=16, chunk=1024),
        "alone": f"{MLA} {alone}",
        "caching": False,
    }


def states(model: str, prefill: str = "", decode: str = "", **more: Any) -> dict[str, Any]:
    """Returns a case's arguments for recurrent states, without prefix caching, which vLLM's CPU kernel for
    Mamba2 lacks."""
    return {
        "model": model,
        "prefill": Side(prefill),
        "decode": Side(decode),
        "alone": "",
        "caching": False,
        **more,
    }


# In bfloat16 a delta net decodes differently than it prefills.
DELTA_NET: dict[str, Any] = {"dtype": "bfloat16", "shifted": True}
# Hits of the prefix cache may end inside a block.
UNIT = "--prefix-match-unit 8"
# vLLM ends a chunk with the last unit of a prompt. In bfloat16 other chunks round differently.
SAME_CHUNKS: dict[str, Any] = {"caching": True, "alone": UNIT}
# With this layout, a slice of a convolution's channels is one run.
CHANNELS_FIRST: dict[str, Any] = {"environment": {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}}

OFFLOADING: dict[str, Any] = {"connector": "MultiConnector", "tier": "OffloadingConnector"}

CASES = (
    Case("llama", "llama", more=(SAMPLES, *STRUCTURES), pool=36),
    Case("mqa", "mqa"),
    Case("mqa-tp2", "mqa", **flags(TP2), alone=""),
    Case("head-80", "head80"),
    Case("head-128", "head128"),
    Case("head-256", "head256"),
    Case("gemma3", "gemma3", pool=66),
    Case("gemma4", "gemma4"),
    # Its chat format has a separate parser, and vLLM refuses every other one. The last of two flags counts.
    Case("gpt-oss", "gpt-oss", **flags("--tool-call-parser openai")),
    Case("llama4", "llama4"),
    Case("mixtral", "mixtral"),
    Case("fp8", "llama", **flags(FP8)),
    Case("fp8-scales", "fp8-scales", **flags(FP8)),
    Case("kv-both", "llama", **flags("", role="kv_both"), alone=""),
    # ExampleConnector saves the first chunk of a prompt and takes it for the whole.
    Case("multi-connector", "llama", **whole(), connector="MultiConnector"),
    Case("example-first", "llama", **whole(), connector="MultiConnector", tier_first=True),
    # vLLM's CPU tier, with a worker that copies on a CPU: host_tier.py.
    Case("offloading", "llama", **OFFLOADING, pool=36),
    Case("offloading-first", "llama", **OFFLOADING, tier_first=True, pool=36),
    Case("offloading-gemma3", "gemma3", **OFFLOADING),
    Case("dp2-decode", "llama", decode=Side(DP2), alone=""),
    Case("priority", "llama", **flags(PRIORITY), pool=36, crowd=PRIORITIES),
    Case("ngram", "llama", **flags(NGRAM), alone=""),
    Case("ngram-decode", "llama", decode=Side(NGRAM), alone=""),
    # A drafter treats the last token of a chunk differently than one within. If chunks ended elsewhere, other
    # drafts would be accepted.
    Case("eagle", "one-layer", prefill=Side(EAGLE), decode=Side(EAGLE), drafts=True),
    Case("eagle3", "quiet", prefill=Side(EAGLE3), decode=Side(EAGLE3), drafts=True),
    Case("draft-model", "llama", **flags(DRAFT_MODEL), drafts=True),
    Case("lora", "llama", **flags(LORA), body={"model": "adapter"}, more=({},)),
    Case("mla", **latent("deepseek-v2")),
    Case("mtp", **latent("mtp", MTP, MTP, alone=MTP), drafts=True),
    # --- P and D with different flags
    Case("tp1-tp2", "llama", **pair("", TP2), pool=36),
    Case("tp2-tp1", "llama", **pair(TP2), pool=36),
    Case("mqa-tp2-tp1", "mqa", **pair(TP2)),
    Case("mqa-tp1-tp2", "mqa", **pair("", TP2)),
    Case("gemma3-tp2-tp1", "gemma3", **pair(TP2)),
    Case("mla-tp2-tp1", **latent("deepseek-v2", TP2)),
    Case("mla-tp1-tp2", **latent("deepseek-v2", "", TP2)),
    Case("block-32-64", "llama", **pair(blocks=(32, 64)), pool=18),
    Case("block-64-32", "llama", **pair(blocks=(64, 32)), pool=36),
    Case("block-32-64-tp1-tp2", "llama", **pair("", TP2, blocks=(32, 64))),
    Case("block-64-32-tp2-tp1", "llama", **pair(TP2, blocks=(64, 32))),
    Case("pp2-pp1", "llama", **pair(PP2)),
    Case("pp1-pp2", "llama", **pair("", PP2)),
    Case("pp2-tp2-tp1", "llama", **pair(f"{PP2} {TP2}")),
    Case("eagle-decode", "one-layer", **pair("", EAGLE)),
    Case("eagle-prefill", "one-layer", **pair(EAGLE)),
    # --- Recurrent states
    Case("granite", **states("granite")),
    Case("granite-tp2-tp1", **states("granite", TP2)),
    Case("granite-tp1-tp2", **states("granite", "", TP2)),
    Case("granite-channels-first-tp2-tp1", **states("granite", TP2, **CHANNELS_FIRST)),
    Case("nemotron-h", **states("nemotron-h")),
    Case("nemotron-h-tp2-tp1", **states("nemotron-h", TP2)),
    Case("falcon-h1", **states("falcon-h1")),
    Case("falcon-h1-tp2-tp1", **states("falcon-h1", TP2)),
    Case("qwen3-next", **states("qwen3-next", **DELTA_NET)),
    # Not with another tensor parallelism: sums in bfloat16 then differ, on one engine too.
    Case("qwen3-next-caching", **states("qwen3-next", **DELTA_NET | {"caching": True})),
    Case("qwen3-next-match-unit", **states("qwen3-next", UNIT, UNIT, **DELTA_NET | SAME_CHUNKS)),
    Case("mamba2", **states("mamba2")),
    # On a CPU it decodes differently than it prefills, and differently with another tensor parallelism.
    Case("lfm2", **states("lfm2", shifted=True)),
    Case("qwen3.5", **states("qwen3.5", **DELTA_NET | {"torchvision": True, "shortest": 2})),
)
