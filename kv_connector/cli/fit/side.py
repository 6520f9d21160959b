"""The options of one side of a pair, as given to `--prefill` and `--decode`: `tp=2,block=16`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

# Bytes per element.
DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}
KV_DTYPES = {**DTYPES, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
ORDERS = {
    "tokens": "tokens first (NHD)",
    "heads": "heads first (HND)",
    "planes": "the planes of K and V of a CPU",
}


class SideError(ValueError):
    """An option that cannot be used. The message names the possible values."""


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise SideError(f"is {text!r}, not a number from 1")
    return int(text)


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise SideError(f"is {text!r}, not one of {', '.join(choices)}")
        return text

    return parse


def _switch(text: str) -> bool:
    return _one_of("on", "off")(text) == "on"


def _key(default: Any, words: str, parse: Callable[[str], Any] = _number) -> Any:
    return field(default=default, metadata={"words": words, "parse": parse})


@dataclass(frozen=True)
class FitSide:
    """The options of an engine on which its pages depend. The metadata are the option's help and parser."""

    tp: int = _key(1, "tensor parallelism")
    pp: int = _key(1, "pipeline parallelism")
    dp: int = _key(1, "data parallelism")
    block: int = _key(0, "tokens a block (16; with order=planes 128, or 16 of a latent)")
    kernel: int = _key(0, "tokens per block of the kernel, if fewer (FlashInfer)")
    order: str = _key(
        "heads",
        "order of a block in memory: heads (HND, which our connector requests from vLLM), tokens "
        "(NHD, only with "
        "VLLM_KV_CACHE_LAYOUT), or planes (on a CPU without AMX)",
        _one_of(*ORDERS),
    )
    dtype: str = _key("", "dtype of the model; default: the checkpoint's", _one_of(*DTYPES))
    kv_cache_dtype: str = _key(
        "", "dtype of the KV cache; default: the checkpoint's, or the model's dtype", _one_of(*KV_DTYPES)
    )
    conv: str = _key("SD", "VLLM_SSM_CONV_STATE_LAYOUT: SD or DS", _one_of("SD", "DS"))
    ssm_dtype: str = _key("", "--mamba-ssm-cache-dtype; default: the model's", _one_of(*DTYPES))
    drafter: str = _key("", "mtp, or a draft model's directory or config.json", str)
    drafts: int = _key(0, "tokens drafted at a time, also by n-gram (1 with a drafter)")
    dcp: int = _key(1, "decode context parallelism")
    pcp: int = _key(1, "prefill context parallelism")
    dbo: bool = _key(False, "microbatches: on or off", _switch)

    @property
    def rows(self) -> int:
        """Rows of a convolution's state beyond those that it needs."""
        return self.drafts or (1 if self.drafter else 0)


KEYS = {one.name.replace("_", "-"): one for one in fields(FitSide)}
HELP = "\n\n".join(f"{key}: {one.metadata['words']}" for key, one in KEYS.items())


def parse_side(text: str) -> FitSide:
    """Parses `tp=2,block=16`; empty: one rank and all defaults. Raises SideError."""
    found: dict[str, Any] = {}
    for word in filter(None, (word.strip() for word in text.split(","))):
        key, equals, value = (part.strip() for part in word.partition("="))
        if key not in KEYS or not equals:
            raise SideError(
                f"{word!r} is not a key and its value, as in tp=2,block=16. Keys: {', '.join(KEYS)}"
            )
        name = KEYS[key].name
        if name in found:
            raise SideError(f"{key} is given twice")
        try:
            found[name] = KEYS[key].metadata["parse"](value)
        except SideError as error:
            raise SideError(f"{key} {error}") from None
    return FitSide(**found)
