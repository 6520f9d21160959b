"""Where the connector says that pages lie, against the tensors that vLLM itself lays over the same memory."""

import ctypes
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from vllm.model_executor.layers.attention.attention import set_default_quant_scales
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheLayout,
    MambaSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.worker.utils import allocate_kv_cache
from vllm_stage import ADDRESS, FULL, SLIDING, get_kv_cache_config_from_groups, model, vllm_config

from kv_connector.lab.model import make_llama
from kv_connector.protocol.geometry import Place, opaque_page
from kv_connector.protocol.layout import GroupLayout, KvLayout, LayerLayout
from kv_connector.protocol.messages import Fingerprint
from kv_connector.protocol.mismatch import mismatch
from kv_connector.vllm import fingerprint, internals
from kv_connector.vllm.connector import WriteImmConnector
from kv_connector.vllm.fingerprint import ADVICE, model_identity, rank_fingerprint
from kv_connector.vllm.internals import (
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
    UnsupportedConfiguration,
    check_configuration,
    kv_scales,
)
from kv_connector.vllm.kv_cache import MemoryRange, kv_layout
from kv_connector.vllm.metadata import RankAddress

__all__ = ["model"]

MLA = MLAAttentionSpec(block_size=32, num_kv_heads=1, head_size=576, dtype=torch.float32)
WIDE = replace(FULL, head_size=128, head_size_v=128)


@pytest.fixture(scope="module")
def config(model: Path) -> Any:
    return vllm_config(model, "kv_both")


def name(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.attn"


def caches(
    config: Any, groups: list[KVCacheGroupSpec], order: str = "LBHNC", kernel_blocks: list[int] | None = None
) -> tuple[KVCacheConfig, dict[str, torch.Tensor]]:
    config.cache_config.kv_cache_layout = KVCacheLayout[order]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(config.cache_config), "get_resolved_kv_cache_layout", lambda _: KVCacheLayout[order]
        )
        patch.setattr(config.cache_config, "num_gpu_blocks_override", 5)
        cache = get_kv_cache_config_from_groups(config, groups, 1 << 30)
    cache.kv_cache_layout = order
    return cache, allocate_kv_cache(cache, torch.device("cpu"), KVCacheLayout[order], kernel_blocks)


def page(layout: KvLayout, memory: tuple[MemoryRange, ...], layer: int, block: int) -> bytes:
    (part,) = layout.layers[layer].parts
    address = memory[part.region].address + part.offset + block * part.block_stride
    return ctypes.string_at(address, part.run_bytes)


def assert_pages_are_the_tensors(
    layout: KvLayout, memory: tuple[MemoryRange, ...], tensors: dict[str, torch.Tensor]
) -> None:
    """Each page holds exactly the values that vLLM's view of that block holds."""
    assert all(memory[region].nbytes >= need for region, need in layout.bytes_per_region().items())
    generator = torch.Generator().manual_seed(1)
    for index, place in enumerate(layout.layers):
        tensor = tensors[place.name]
        for block in range(layout.groups[0].num_blocks):
            split = tensor.shape[0] // layout.groups[0].num_blocks
            view = tensor[block * split : (block + 1) * split]
            values = torch.rand(view.shape, generator=generator)
            view.copy_(values)
            got = torch.frombuffer(bytearray(page(layout, memory, index, block)), dtype=torch.float32)
            assert torch.equal(got.sort().values, values.flatten().sort().values)


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
@pytest.mark.parametrize("spec", [FULL, MLA], ids=["full", "mla"])
def test_one_group(config: Any, order: str, spec: Any) -> None:
    group = KVCacheGroupSpec([name(2), name(0), name(10)], spec)
    cache, tensors = caches(config, [group], order)
    layout, memory = kv_layout(cache, tensors)
    assert [layer.name for layer in layout.layers] == [name(0), name(2), name(10)], "forward order"
    assert len(memory) == 1
    assert {layer.page_bytes for layer in layout.layers} == {spec.page_size_bytes}
    assert_pages_are_the_tensors(layout, memory, tensors)


def test_two_attention_modules_a_layer(config: Any) -> None:
    """LongCat's, whose hooks are called one after the other."""
    names = [f"model.layers.{layer}.self_attn.{module}.attn" for layer in (2, 10) for module in (0, 1)]
    cache, tensors = caches(config, [KVCacheGroupSpec([names[i] for i in (3, 0, 2, 1)], MLA)])
    layout, _ = kv_layout(cache, tensors)
    assert [layer.name for layer in layout.layers] == names


def test_groups_share_the_memory(config: Any) -> None:
    groups = [KVCacheGroupSpec([name(0), name(2)], FULL), KVCacheGroupSpec([name(1), name(3)], SLIDING)]
    layout, memory = kv_layout(*caches(config, groups))
    assert [layer.group for layer in layout.layers] == [0, 1, 0, 1]
    assert layout.layers[0].parts == layout.layers[1].parts
    assert [group.kind for group in layout.groups] == ["full_attention", "sliding_window 64"]
    assert len(memory) == 1


def test_a_window_that_a_drafter_reads_behind_is_another_kind(config: Any) -> None:
    group = KVCacheGroupSpec([name(0)], replace(SLIDING, extra_retained_tokens=2))
    layout, _ = kv_layout(*caches(config, [group]))
    assert [group.kind for group in layout.groups] == ["sliding_window 66"]


def test_layers_of_one_group_with_pages_of_two_sizes(config: Any) -> None:
    specs = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={name(0): FULL, name(1): WIDE})
    cache, tensors = caches(config, [KVCacheGroupSpec([name(0), name(1)], specs)])
    layout, memory = kv_layout(cache, tensors)
    assert [layer.page_bytes for layer in layout.layers] == [FULL.page_size_bytes, WIDE.page_size_bytes]
    assert_pages_are_the_tensors(layout, memory, tensors)


def test_a_scheduler_block_of_several_kernel_blocks_is_one_page(config: Any) -> None:
    spec = replace(FULL, block_size=128)
    cache, tensors = caches(config, [KVCacheGroupSpec([name(0), name(1)], spec)], kernel_blocks=[32])
    assert tensors[name(0)].shape[0] == 4 * cache.num_blocks
    layout, memory = kv_layout(cache, tensors)
    assert layout.layers[0].page_bytes == spec.page_size_bytes
    assert_pages_are_the_tensors(layout, memory, tensors)


def test_layers_that_share_anothers_pages_are_left_out(config: Any) -> None:
    cache, tensors = caches(config, [KVCacheGroupSpec([name(0), name(1)], FULL)])
    tensors[name(2)] = tensors[name(1)]
    layout, _ = kv_layout(cache, tensors)
    assert [layer.name for layer in layout.layers] == [name(0), name(1)]


def test_pages_in_pieces_are_refused(config: Any) -> None:
    cache, tensors = caches(config, [KVCacheGroupSpec([name(0)], FULL)], "LHBNC")
    with pytest.raises(UnsupportedConfiguration, match="VLLM_KV_CACHE_LAYOUT"):
        kv_layout(cache, tensors)


def test_a_tensor_that_lies_elsewhere_is_refused(config: Any) -> None:
    cache, tensors = caches(config, [KVCacheGroupSpec([name(0), name(1)], FULL)])
    tensors[name(0)], tensors[name(1)] = tensors[name(1)], tensors[name(0)]
    with pytest.raises(UnsupportedConfiguration, match="bytes into its KV cache storage"):
        kv_layout(cache, tensors)


def test_memory_of_another_kind_of_device_is_refused(config: Any) -> None:
    cache, tensors = caches(config, [KVCacheGroupSpec([name(0)], FULL)])

    class Elsewhere:
        device = torch.device("xpu:0")

        def __getattr__(self, attribute: str) -> Any:
            return getattr(tensors[name(0)], attribute)

    with pytest.raises(UnsupportedConfiguration, match="CPU and CUDA memory; this one is on xpu:0"):
        kv_layout(cache, {name(0): Elsewhere()})


MAMBA = MambaSpec(block_size=32, shapes=((2, 512),), dtypes=(torch.float32,))
COMPRESSED = replace(MLA, tokens_per_state=4)


class OtherState(MambaSpec):
    """Of a plugin, say."""


OTHER_STATE = OtherState(block_size=32, shapes=((2, 512),), dtypes=(torch.float32,))


def test_recurrent_states_are_rows(config: Any) -> None:
    """Of a group beside attention, in the same blocks of the same memory."""
    attention = replace(WIDE, block_size=64, page_size_padded=None)
    state = replace(MAMBA, page_size_padded=attention.page_size_bytes)
    groups = [KVCacheGroupSpec([name(0), name(2)], state), KVCacheGroupSpec([name(1), name(3)], attention)]
    cache, tensors = caches(config, groups)
    check_configuration(config, cache)
    layout, memory = kv_layout(cache, tensors)
    assert [(group.block_size, group.null_block) for group in layout.groups] == [(0, None), (64, 0)]
    assert [layer.group for layer in layout.layers] == [0, 1, 0, 1]
    for index in (0, 2):
        tensor = tensors[name(index)]
        for block in range(layout.groups[0].num_blocks):
            values = torch.randint(-128, 128, (state.state_content_size_bytes,), dtype=torch.int8)
            tensor[block].view(torch.int8).flatten()[: len(values)] = values
            assert page(layout, memory, index, block)[: len(values)] == values.numpy().tobytes()


@pytest.mark.parametrize(
    ("group", "problem"),
    [
        (KVCacheGroupSpec([name(0)], OTHER_STATE), r"group 0 yet \(OtherState\)"),
        (KVCacheGroupSpec([name(0)], COMPRESSED), r"group 0 yet \(MLAAttentionSpec\)"),
        (KVCacheGroupSpec([name(0)], FULL, host_resident=True), "not in device memory"),
        (KVCacheGroupSpec([name(0)], FULL, enable_kv_transfer=False), "not in device memory"),
    ],
)
def test_unknown_caches_are_refused(config: Any, group: KVCacheGroupSpec, problem: str) -> None:
    cache = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[group])
    with pytest.raises(UnsupportedConfiguration, match=problem):
        check_configuration(config, cache)


@pytest.mark.parametrize("follows", [False, True])
def test_sleep_is_refused_where_vllm_does_not_tell_of_it(
    config: Any, follows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[])
    monkeypatch.setattr(config.model_config, "enable_sleep_mode", True)
    monkeypatch.setattr(internals, "_release", SimpleNamespace(FOLLOWS_SLEEP=follows))
    problem = pytest.raises(UnsupportedConfiguration, match="--enable-sleep-mode")
    with nullcontext() if follows else problem:
        check_configuration(config, cache)


@pytest.mark.parametrize(
    "parallel",
    [
        {"pipeline_parallel_size": 2},
        {"decode_context_parallel_size": 2},
        {"prefill_context_parallel_size": 2},
        {"enable_dbo": True},
    ],
)
def test_unsupported_parallelism_is_refused(
    config: Any, parallel: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[])
    check_configuration(config, cache)
    for key, value in parallel.items():
        monkeypatch.setattr(config.parallel_config, key, value)
    with pytest.raises(UnsupportedConfiguration, match="does not support"):
        check_configuration(config, cache)


def test_anothers_handshake_metadata_is_refused(config: Any) -> None:
    """vLLM's MultiConnector hands all its connectors the metadata of one of them."""

    class Another(KVConnectorHandshakeMetadata):  # type: ignore[misc]
        pass

    cache = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[])
    connector = WriteImmConnector(config, KVConnectorRole.SCHEDULER, cache)
    with pytest.raises(UnsupportedConfiguration, match=r"another's \(Another\): put WriteImmConnector first"):
        connector.set_xfer_handshake_metadata_pp_aware({(0, 0): Another()})
    connector.set_xfer_handshake_metadata_pp_aware({(0, 0): RankAddress(ADDRESS)})
    assert connector.scheduler is not None
    assert connector.scheduler.prefill.address == ADDRESS


def scaled(kv_cache_dtype: str, k: float | None, v: float | None) -> torch.nn.Module:
    """A layer as vLLM leaves it behind once the weights are loaded; None: the checkpoint has no scale."""
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


def test_the_scales_of_quantized_pages_are_found() -> None:
    """Of two engines with `--kv-cache-dtype fp8` one may have them from its checkpoint, the other none."""
    heads = scaled("fp8", 1.0, 1.0)
    heads._k_scale, heads._v_scale = torch.tensor([[0.5, 2.0]]), torch.tensor([[0.25, 4.0]])
    layers = {
        "calibrated": scaled("fp8", 0.5, 0.25),
        "not calibrated": scaled("fp8_e4m3", None, None),
        "per head": heads,
        "not quantized": scaled("auto", 0.5, 0.25),
        "no attention": torch.nn.Module(),
    }
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    assert kv_scales(config, [*layers]) == ((0.5, 0.25), (1.0, 1.0), (0.5, 2.0, 0.25, 4.0), (), ())


@pytest.fixture
def fingerprint_of(config: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Fingerprint]:
    """Of a rank with pages like these and layers with such scales; the model has not been loaded."""

    def make(page_bytes: int, *scales: tuple[float, ...], **parallel: int) -> Fingerprint:
        page = opaque_page(Place(0, 0, page_bytes), page_bytes)
        layers = tuple(LayerLayout(name(i), 0, "", page) for i in range(len(scales)))
        with monkeypatch.context() as patch:
            patch.setattr(fingerprint, "kv_scales", lambda *_: scales)
            patch.setattr(fingerprint, "attention_backends", lambda *_: "CPU_ATTN")
            patch.setattr(fingerprint, "attention_isa", lambda *_: "")
            for size, value in parallel.items():
                patch.setattr(config.parallel_config, size, value)
            cache = SimpleNamespace(kv_cache_layout="LBHNC")
            return rank_fingerprint(config, cache, KvLayout((GroupLayout(5, 32, "full"),), layers))

    return make


def test_there_is_advice_for_each_pair(fingerprint_of: Callable[..., Fingerprint]) -> None:
    pairs = fingerprint_of(64, (), ())
    assert [pair.name for pair in pairs] == list(ADVICE)
    assert dict(msgspec.structs.astuple(pair) for pair in pairs)["block_sizes"] == ("32",)
    assert {advice.follows for advice in ADVICE.values()} <= {"", *ADVICE}


def test_a_checkpoint_with_other_scales_is_refused(fingerprint_of: Callable[..., Fingerprint]) -> None:
    advice = "load the same checkpoint on both sides: it has the scales of the quantized KV cache"

    def refusal(ours: tuple[float, ...], theirs: tuple[float, ...]) -> str | None:
        layers = [(0.5, 0.25)] * 79
        return mismatch(fingerprint_of(64, *layers, ours), fingerprint_of(64, *layers, theirs), ADVICE)

    text = refusal((0.5, 0.25), (1.0, 1.0))
    assert text == f"kv_scales[79]: prefill has 0.5 0.25, decode has 1.0 1.0: {advice}"
    text = refusal((0.5, 0.25), ())
    assert text == f"kv_scales[79]: prefill has 0.5 0.25, decode has none: {advice}"
    heads = tuple(i / 3 for i in range(256))
    text = refusal(heads, (*heads[:-1], 1.0))
    assert text is not None
    assert re.fullmatch(
        rf"kv_scales\[79\]: prefill has 256 scales (\w+), decode has 256 scales (?!\1)\w+: {advice}", text
    )
    assert refusal(heads, heads) is None


def test_another_tensor_parallel_size_is_the_one_reason(fingerprint_of: Callable[..., Fingerprint]) -> None:
    one = fingerprint_of(64, (1.0, 2.0, 3.0, 4.0))
    two = fingerprint_of(32, (1.0, 3.0), tensor_parallel_size=2)
    advice = ADVICE["tensor_parallel"].text
    assert mismatch(one, two, ADVICE) == f"tensor_parallel: prefill has 1, decode has 2: {advice}"


def test_the_model_in_the_fingerprint_is_its_configuration_not_its_place(tmp_path: Path) -> None:
    def identity(directory: str, **shape: int) -> str:
        model = make_llama(tmp_path / directory, hidden=64, intermediate=64, **shape)
        return model_identity(vllm_config(model, "kv_both").model_config)

    assert identity("a") == identity("b")
    assert identity("a") != identity("c", layers=2)
