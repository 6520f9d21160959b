"""The pairs of P and D that are tried, and what each has to show. docs/compatibility.md names them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from kv_connector.lab.cluster import Role


@dataclass(frozen=True)
class Side:
    """One engine: vLLM's flags, words apart. `@llama` stands for the directory of that model of kinds.py."""

    flags: str = ""
    block: int = 32
    chunk: int = 256
    """Tokens of a step. P's of a model without states end inside blocks."""
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
    """Flags of the single engine, where they are not D's: several cases share its answers then."""
    dtype: str = "float32"
    caching: bool = True
    """Prefix caching."""
    shifted: bool = False
    """Where a kernel decodes otherwise than it prefills: the single engine's first token becomes the last of
    P's and D's prompt, which it has decoded from there as D does."""
    body: Mapping[str, Any] = field(default_factory=dict)
    """Of every request."""
    more: tuple[Mapping[str, Any], ...] = ()
    """Further requests, one of each."""
    drafts: bool = False
    """D's drafter must be right as often as the single engine's."""
    pool: int = 0
    """D's blocks, where they are to be too few for all its requests: vLLM takes some away again. The longest
    request needs that many less a few."""
    crowd: tuple[Mapping[str, Any], ...] = ({},)
    """Bodies of these requests, in turn."""
    connector: str = "WriteImmConnector"
    shortest: int = 1
    """Tokens of a prompt that one engine can do."""
    torchvision: bool = False
    """vLLM imports it for the model: see no_torchvision.py."""
    environment: Mapping[str, str] = field(default_factory=dict)


def flags(text: str, **more: Any) -> dict[str, Any]:
    """Of both sides."""
    return {"prefill": Side(text, chunk=200, **more), "decode": Side(text, **more)}


def whole() -> dict[str, Any]:
    """Of both sides: each prompt in one step."""
    return {"prefill": Side(chunk=1024), "decode": Side(chunk=1024)}


def pair(prefill: str = "", decode: str = "", blocks: tuple[int, int] = (32, 32)) -> dict[str, Any]:
    """Of P and of D, whose tokens must be those of one engine without any."""
    return {
        "prefill": Side(prefill, chunk=200, block=blocks[0]),
        "decode": Side(decode, block=blocks[1]),
        "alone": "",
    }


TP2 = "--tensor-parallel-size 2"
DP2 = "--data-parallel-size 2"
# A stage that is not the first needs the run before the first request that --enforce-eager leaves out.
PP2 = '--pipeline-parallel-size 2 --no-enforce-eager --compilation-config {"mode":1,"backend":"eager"}'
FP8 = "--kv-cache-dtype fp8"


def left_out(*flags: str) -> str:
    """Why this machine cannot run an engine with these flags; empty if it can."""
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


# vLLM's CPU kernel for rotary embeddings goes astray in MLA's slices of queries: what it computes of a token
# then depends on those behind it. PyTorch's own operations do not.
# Where the processor has AMX, vLLM takes another kernel, which refuses float32.
MLA = '--compilation-config {"custom_ops":["-rotary_embedding"]} --attention-backend CPU_MLA'


def latent(model: str, prefill: str = "", decode: str = "", alone: str = "") -> dict[str, Any]:
    """vLLM's CPU kernel for MLA takes blocks of 16 tokens, prompts in one piece and no prefix caching."""
    return {
        "model": model,
        "prefill": Side(f"{MLA} {prefill}", block=16, chunk=1024),
        "decode": Side(f"{MLA} {decode}", block=16, chunk=1024),
        "alone": f"{MLA} {alone}",
        "caching": False,
    }


def states(model: str, prefill: str = "", decode: str = "", **more: Any) -> dict[str, Any]:
    """Without prefix caching, which vLLM's CPU kernel for Mamba2 has not."""
    return {
        "model": model,
        "prefill": Side(prefill),
        "decode": Side(decode),
        "alone": "",
        "caching": False,
        **more,
    }


# In bfloat16 a delta net decodes otherwise than it prefills.
DELTA_NET: dict[str, Any] = {"dtype": "bfloat16", "shifted": True}
# A slice of a convolution's channels is then one run.
CHANNELS_FIRST: dict[str, Any] = {"environment": {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}}

CASES = (
    Case("llama", "llama", more=(SAMPLES, *STRUCTURES), pool=36),
    Case("mqa", "mqa"),
    Case("mqa-tp2", "mqa", **flags(TP2), alone=""),
    Case("head-80", "head80"),
    Case("head-128", "head128"),
    Case("head-256", "head256"),
    Case("gemma3", "gemma3", pool=66),
    Case("gemma4", "gemma4"),
    # Its chat format has a parser of its own, and vLLM refuses every other one. The last of two flags counts.
    Case("gpt-oss", "gpt-oss", **flags("--tool-call-parser openai")),
    Case("llama4", "llama4"),
    Case("mixtral", "mixtral"),
    Case("fp8", "llama", **flags(FP8)),
    Case("fp8-scales", "fp8-scales", **flags(FP8)),
    Case("kv-both", "llama", **flags("", role="kv_both"), alone=""),
    # ExampleConnector saves the first chunk of a prompt and takes it for the whole.
    Case("multi-connector", "llama", **whole(), connector="MultiConnector"),
    Case("dp2-decode", "llama", decode=Side(DP2), alone=""),
    Case("priority", "llama", **flags(PRIORITY), pool=36, crowd=PRIORITIES),
    Case("ngram", "llama", **flags(NGRAM), alone=""),
    Case("ngram-decode", "llama", decode=Side(NGRAM), alone=""),
    # A drafter takes the last token of a chunk otherwise than one within: chunks that end elsewhere would be
    # accepted otherwise.
    Case("eagle", "one-layer", prefill=Side(EAGLE), decode=Side(EAGLE), drafts=True),
    Case("eagle3", "quiet", prefill=Side(EAGLE3), decode=Side(EAGLE3), drafts=True),
    Case("draft-model", "llama", **flags(DRAFT_MODEL), drafts=True),
    Case("lora", "llama", **flags(LORA), body={"model": "adapter"}, more=({},)),
    Case("mla", **latent("deepseek-v2")),
    Case("mtp", **latent("mtp", MTP, MTP, alone=MTP), drafts=True),
    # --- P and D that differ
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
    # Not with another tensor parallelism: sums in bfloat16 then come out otherwise, on one engine, too.
    Case("qwen3-next-caching", **states("qwen3-next", **DELTA_NET | {"caching": True})),
    Case("mamba2", **states("mamba2")),
    # On a CPU it decodes otherwise than it prefills, and otherwise with another tensor parallelism.
    Case("lfm2", **states("lfm2", shifted=True)),
    Case("qwen3.5", **states("qwen3.5", **DELTA_NET | {"torchvision": True, "shortest": 2})),
)
