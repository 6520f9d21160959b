"""Facts that must be equal on two engines: the model as a whole, and the element types of each layer."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from protocol_setup import misfit
from vllm.model_executor.layers.attention.attention import set_default_quant_scales
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVQuantMode
from vllm_pages import PagesRank, attention, engine, make_rank, model_config, name
from vllm_stage import FULL, model, vllm_config

from kv_connector.lab.model import make_llama
from kv_connector.protocol.plans.plan import ALIKE
from kv_connector.protocol.session.fingerprint import ADVICE
from kv_connector.protocol.session.mismatch import mismatch
from kv_connector.vllm.model import model_facts
from kv_connector.vllm.model.model_facts import kv_heads, kv_scales, rank_fingerprint

__all__ = ["model"]


@pytest.fixture(scope="module")
def config(model: Path) -> Any:
    return vllm_config(model, "kv_both")


def scaled(kv_cache_dtype: str, k: float | None, v: float | None) -> torch.nn.Module:
    """A layer as vLLM leaves it behind once the weights are loaded. None: the checkpoint has no scale."""
    layer = torch.nn.Module()
    set_default_quant_scales(layer, register_buffer=True)
    layer.kv_cache_dtype = kv_cache_dtype
    method = BaseKVCacheMethod(None)  # type: ignore[arg-type]
    method.create_weights(layer)
    for parameter, scale in ((layer.k_scale, k), (layer.v_scale, v)):
        if scale is not None:
            parameter.data.fill_(scale)
    method.process_weights_after_loading(layer)
    return layer


def by_head(k: list[float], v: list[float]) -> torch.nn.Module:
    layer = scaled("fp8", 1.0, 1.0)
    layer._k_scale, layer._v_scale = torch.tensor([k]), torch.tensor([v])
    return layer


def test_the_scales_of_quantized_pages_are_found() -> None:
    """With `--kv-cache-dtype fp8`, one engine may have scales from its checkpoint, and the other none."""
    layers = {
        "calibrated": scaled("fp8", 0.5, 0.25),
        "not calibrated": scaled("fp8_e4m3", None, None),
        "per head": by_head([0.5, 2.0], [0.25, 4.0]),
        "not quantized": scaled("auto", 0.5, 0.25),
        "no attention": torch.nn.Module(),
    }
    assert kv_scales(engine(layers), [*layers]) == {
        "calibrated": ((0.5,), (0.25,)),
        "not calibrated": ((1.0,), (1.0,)),
        "per head": ((0.5, 2.0), (0.25, 4.0)),
        "not quantized": (),
        "no attention": (),
    }


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_scales_of_all_heads_are_the_same_however_many_ranks_have_them(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    k, v = [0.5, 1.0, 1.5, 2.0], [3.0, 3.5, 4.0, 4.5]

    def layers(rank: int) -> dict[str, Any]:
        heads = slice(rank * 4 // ranks, rank * 4 // ranks + max(1, 4 // ranks))
        return {"per head": by_head(k[heads], v[heads]), "per tensor": scaled("fp8", 0.5, 0.25)}

    def gather(everyones: list[Any], own: Any, group: Any) -> None:
        assert group == "this stage's ranks"
        for rank in range(ranks):
            everyones[rank] = [model_facts._scales(layer) for layer in layers(rank).values()]
        assert own in everyones

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    monkeypatch.setattr(model_facts, "get_tp_group", lambda: SimpleNamespace(cpu_group="this stage's ranks"))
    assert kv_scales(engine(layers(1), ranks, kv_heads=4), ["per head", "per tensor"]) == {
        "per head": (tuple(k), tuple(v)),
        "per tensor": ((0.5,), (0.25,)),
    }


def quantized(config: Any, layer: torch.nn.Module) -> PagesRank:
    """A rank of 80 layers, of which the last is ``layer``."""
    spec = replace(FULL, dtype=torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR, num_kv_heads=1)
    usual = attention(kv_cache_dtype="fp8", _k_scale=torch.tensor(0.5), _v_scale=torch.tensor(0.25))
    last = attention(kv_cache_dtype="fp8", _k_scale=layer._k_scale, _v_scale=layer._v_scale)
    groups = [KVCacheGroupSpec([name(i) for i in range(80)], spec)]
    return make_rank(config, groups, lambda layer: last if layer == name(79) else usual, kv_heads=1)


def test_a_checkpoint_with_other_scales_is_refused(config: Any) -> None:
    def refusal(ours: torch.nn.Module, theirs: torch.nn.Module) -> str:
        return misfit(quantized(config, ours).layout, quantized(config, theirs).layout)

    calibrated, plain = scaled("fp8", 0.5, 0.25), scaled("fp8", None, None)
    assert refusal(calibrated, plain) == (
        f"layer {name(79)}: format: prefill engine has 'float8_e4m3fn times 0.5, 0.25, 64 + 64 a head', "
        f"decode engine has 'float8_e4m3fn times 1.0, 1.0, 64 + 64 a head': {ALIKE}"
    )
    assert refusal(calibrated, scaled("fp8", 0.5, 0.25)) == ""
    heads = [i / 3 for i in range(256)]
    text = refusal(by_head(heads, heads), by_head([*heads[:-1], 1.0], heads))
    assert re.search(r"has '.* times 256 scales each \(digest (\w+)\), .*has .*\(digest (?!\1)\w+\)", text)
    assert refusal(by_head(heads, heads), by_head(heads, heads)) == ""


@pytest.mark.parametrize(
    ("dtype", "layer", "words"),
    [
        (torch.bfloat16, {}, "bfloat16, 64 + 64 a head"),
        (torch.bfloat16, {"kv_cache_dtype": "auto"}, "bfloat16, 64 + 64 a head"),
        (torch.float16, {"kv_cache_dtype": "float16"}, "float16, 64 + 64 a head"),
        (torch.uint8, {"kv_cache_dtype": "fp8"}, "float8_e4m3fn, 64 + 64 a head"),
        (torch.uint8, {"kv_cache_dtype": "fp8_e4m3"}, "float8_e4m3fn, 64 + 64 a head"),
        (torch.uint8, {"kv_cache_dtype": "fp8_e5m2"}, "fp8_e5m2, 64 + 64 a head"),
        (torch.int8, {"kv_cache_dtype": "int8_per_token_head"}, "int8_per_token_head, 64 + 64 a head"),
    ],
)
def test_format_names_the_type_of_the_numbers(
    config: Any, dtype: torch.dtype, layer: dict[str, Any], words: str
) -> None:
    """vLLM stores both kinds of fp8 as bytes."""
    groups = [KVCacheGroupSpec([name(0)], replace(FULL, dtype=dtype))]

    def attention_of(backend: str, _: str) -> Any:
        return attention(backend, **layer)

    for backend in ("FLASH_ATTN", "TRITON_ATTN"):
        rank = make_rank(config, groups, partial(attention_of, backend))
        assert rank.layout.layers[0].format == words


@pytest.mark.parametrize(
    ("of_rank", "ranks", "said", "heads"),
    [
        (8, 1, {"kv_heads": 8}, 8),
        (7, 1, {"kv_heads": 8}, 7),  # all heads
        (2, 4, {"kv_heads": 8}, 8),
        (1, 8, {"kv_heads": 8}, 8),
        (1, 16, {"kv_heads": 8}, 8),
        (1, 3, {"kv_heads": 1}, 1),
        (1, 4, {"kv_heads": 8}, None),
        (8, 4, {"kv_heads": 8}, None),  # every rank has all heads
        (4, 2, {"kv_heads": 4, "swa_num_key_value_heads": 8}, 8),
        (2, 2, {"kv_heads": 4, "swa_num_key_value_heads": 8}, 4),
        (1, 8, {"kv_heads": 4, "swa_num_key_value_heads": 8}, None),
        (1, 8, {"kv_heads": 4, "other": {"layers": [{"num_attention_groups": 8}]}}, None),
        (1, 8, {"kv_heads": 8, "drafter": model_config(32)}, 8),
        (4, 8, {"kv_heads": 8, "drafter": model_config(32)}, 32),
        (1, 8, {"kv_heads": 8, "drafter": model_config(2)}, None),
    ],
)
def test_how_many_heads_the_model_has(
    of_rank: int, ranks: int, said: dict[str, Any], heads: int | None
) -> None:
    assert kv_heads(engine({}, ranks, **said), of_rank) == heads


def test_number_of_heads_comes_from_the_models_configuration(tmp_path: Path) -> None:
    made = make_llama(tmp_path, hidden=64, intermediate=64, heads=4, kv_heads=2, head_dim=16)
    config = vllm_config(made, "kv_both")
    for ranks in (1, 2, 4):
        config.parallel_config.tensor_parallel_size = ranks
        of_rank = config.model_config.get_num_kv_heads(config.parallel_config)
        assert kv_heads(config, of_rank) == 2


def test_layers_that_differ_are_distinguished(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    arch = SimpleNamespace(per_layer_overrides=[{"total_num_kv_heads": 8}, {"total_num_kv_heads": 4}])
    mixed = engine({}, 4, kv_heads=8)
    mixed.model_config.model_arch_config = arch
    assert [kv_heads(mixed, of_rank) for of_rank in (2, 1)] == [8, 4]


def test_there_is_advice_for_each_pair(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = rank_fingerprint(config)
    assert [pair.name for pair in ours] == list(ADVICE)
    monkeypatch.setattr(config.model_config, "dtype", torch.bfloat16)
    assert mismatch(ours, rank_fingerprint(config), ADVICE) == (
        "dtype: prefill engine has float32, decode engine has bfloat16: "
        "start both engines with the same --dtype"
    )


def test_the_model_in_the_fingerprint_is_its_configuration_not_its_place(tmp_path: Path) -> None:
    def identity(directory: str, **shape: int) -> str:
        model = make_llama(tmp_path / directory, hidden=64, intermediate=64, **shape)
        (found,) = (
            pair.value for pair in rank_fingerprint(vllm_config(model, "kv_both")) if pair.name == "model"
        )
        return str(found)

    assert identity("a") == identity("b")
    assert identity("a") != identity("c", layers=2)
