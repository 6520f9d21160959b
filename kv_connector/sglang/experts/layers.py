"""Facts of a server and its layers of experts, which decide whether kv-connector serves a layer."""

from __future__ import annotations

from dataclasses import dataclass

from kv_connector.moe.settings import HIDDEN_UNIT, MAX_RANKS, MAX_TOP_K

_RUNNERS = {
    "deep_gemm": ("UnquantizedFusedMoEMethod", "Fp8MoEMethod"),
    # Its fp8 experts compute one scale for a whole tensor, and some rows hold old bytes.
    "flashinfer_cutlass": ("UnquantizedFusedMoEMethod",),
}
"""SGLang's runners of experts that are served, each with the classes of its layers' weights."""


@dataclass(frozen=True)
class ExpertRank:
    """This process among those that exchange rows."""

    rank: int
    ranks: int
    device: int | None
    """CUDA ordinal. None: host memory."""
    problem: str = ""
    """The reason why SGLang keeps its own exchange in this server, or ""."""


@dataclass(frozen=True)
class SglangLayer:
    """One layer of experts."""

    hidden: int
    """Elements of a row."""
    experts: int
    """Physical experts of all ranks."""
    local: int
    """Physical experts of this rank."""
    shared: int
    """Shared experts that the layer's kernel computes with the others."""
    top_k: int
    dtype: str
    """Element type of the model, such as bfloat16."""
    runner: str
    """SGLang's name of the kernels."""
    method: str
    """SGLang's class of the layer's weights."""

    @property
    def no_expert(self) -> int:
        """The id that SGLang gives places of a token without an expert, for this runner."""
        return -1 if self.runner == "deep_gemm" else self.experts

    def problem(self, ranks: int) -> str:
        """Returns the reason why SGLang's exchange serves this layer, or ""."""
        if self.dtype != "bfloat16":
            return f"the layer computes in {self.dtype} instead of bfloat16"
        if self.runner not in _RUNNERS:
            return f"the runner is {self.runner} instead of {' or '.join(_RUNNERS)} (--moe-runner-backend)"
        if self.method not in _RUNNERS[self.runner]:
            return f"the runner {self.runner} is not served with weights of {self.method}"
        if self.shared:
            return "shared experts are part of the layer (--disable-shared-experts-fusion)"
        if self.local * ranks != self.experts:
            return f"this rank has {self.local} of {self.experts} experts, with {ranks} ranks"
        if self.hidden % HIDDEN_UNIT:
            return f"rows have {self.hidden} elements, which is no multiple of {HIDDEN_UNIT}"
        if not 1 <= self.top_k <= MAX_TOP_K:
            return f"a token has {self.top_k} experts instead of 1 to {MAX_TOP_K}"
        return ""


def ranks_problem(ranks: int) -> str:
    """Returns the reason why this number of ranks is not served, or ""."""
    return "" if 2 <= ranks <= MAX_RANKS else f"{ranks} ranks exchange rows instead of 2 to {MAX_RANKS}"
