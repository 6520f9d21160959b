"""kv-connector doctor --model: its findings about models and pairs, and its answers to wrong input."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from command_line import invoke, one_line
from model_configs import CONFIGS, LLAMA, write

from kv_connector.cli.fit import pair
from kv_connector.cli.fit.layout import engine
from kv_connector.cli.fit.model import read_model
from kv_connector.cli.fit.side import KEYS, parse_side
from kv_connector.cli.main import app
from kv_connector.protocol.pages.layout import layout_problem

run = partial(invoke, app)
BYTES = 4 * 4 * 64 * 2 * 2  # bytes of a token of LLAMA: layers, heads, head size, K and V, bfloat16


def judge(path: Path, config: dict[str, Any], prefill: str = "", decode: str = "", tokens: int = 4096) -> Any:
    """Returns the report; the exit status must match it."""
    sides = ("--prefill", prefill, "--decode", decode, "--tokens", str(tokens))
    status, output = run("doctor", "--model", str(write(path, config)), *sides, "--json")
    report = json.loads(output)
    assert status == (0 if report["fits"] else 1)
    return report


# --- The cost of a pair


@pytest.mark.parametrize("order", ["tokens", "heads", "planes"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_every_kind_of_model_has_layouts_as_engines_show_them(tmp_path: Path, kind: str, order: str) -> None:
    model = read_model(write(tmp_path, CONFIGS[kind]))
    for side in (f"tp=2,order={order}", f"pp=2,order={order},conv=DS"):
        for rank in engine(model, parse_side(side)).ranks:
            assert layout_problem(rank.layout, 1) is None
    report = judge(tmp_path, CONFIGS[kind], f"tp=2,order={order}", f"pp=2,order={order}")
    assert [cost["sources"] for cost in report["costs"]] == [[0, 1]] * 2
    assert report["kv_bytes_per_token"] + report["state_bytes_per_request"] > 0


def test_a_prompt_of_grouped_query_attention(tmp_path: Path) -> None:
    """All tokens but the last, in whole blocks: 63 blocks of 64."""
    report = judge(tmp_path, LLAMA, "block=64", "block=64", tokens=4033)
    (cost,) = report["costs"]
    assert report["layers"] == {"full attention": 4}
    assert report["kv_bytes_per_token"] == BYTES
    assert cost["nbytes"] == 63 * 64 * BYTES
    assert (cost["writes"], cost["page_writes"], cost["many"]) == (63 * 4, 1, False)


def test_only_the_tokens_of_a_window_are_counted(tmp_path: Path) -> None:
    """The token after 4,095 attends to itself and 511 tokens before it: from block 224 to block 255."""
    report = judge(tmp_path, CONFIGS["gemma3"])
    assert report["layers"] == {"full attention": 1, "sliding window (512 tokens)": 6}
    assert report["costs"][0]["writes"] == 256 + 6 * 32


def test_only_the_tokens_of_a_chunk_are_counted(tmp_path: Path) -> None:
    """Token 999 is in the chunk that begins at 768. One layer of four attends to all tokens."""
    report = judge(tmp_path, CONFIGS["llama4"], tokens=1000)
    assert report["costs"][0]["writes"] == 63 + 3 * (63 - 48)
    assert "chunked local attention was never tested" in report["notes"][0]


def test_a_state_does_not_grow_with_the_prompt(tmp_path: Path) -> None:
    short, long = (judge(tmp_path, CONFIGS["mamba2"], tokens=n)["costs"][0] for n in (10, 100_000))
    assert short == long
    assert short["writes"] == 4


def test_a_latent_is_had_of_any_rank(tmp_path: Path) -> None:
    report = judge(tmp_path, CONFIGS["deepseek-v2"], "tp=4", "tp=8")
    assert [cost["sources"] for cost in report["costs"]] == [[rank // 2] for rank in range(8)]
    assert {cost["nbytes"] for cost in report["costs"]} == {4 * 4096 * 576 * 2}


def test_stages_are_drawn_on_by_their_layers(tmp_path: Path) -> None:
    report = judge(tmp_path, LLAMA, "pp=2,tp=2", "pp=4")
    assert [cost["sources"] for cost in report["costs"]] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert report["prefill"]["ranks"] == report["decode"]["ranks"] == 4


def test_layers_that_keep_nothing_are_divided_among_stages_too(tmp_path: Path) -> None:
    config = {**CONFIGS["nemotron-h"], "num_hidden_layers": 1, "hybrid_override_pattern": "M*M*--"}
    model = read_model(write(tmp_path, config))
    assert [len(rank.layout.layers) for rank in engine(model, parse_side("pp=2")).ranks] == [3, 1]
    assert judge(tmp_path, config, "pp=3", "pp=3")["costs"][2]["writes"] == 0


# --- Many writes


def test_many_writes_are_reported_with_their_remedy(tmp_path: Path) -> None:
    """If tokens come first in a block, a slice of the block's heads is one run for each token."""
    report = judge(tmp_path, LLAMA, "tp=2,order=tokens", "tp=1,order=tokens")
    (cost,) = report["costs"]
    assert (cost["page_writes"], cost["least_bytes"], cost["many"]) == (16, 2 * 64 * 2 * 2, True)
    assert report["remedy"] == "VLLM_KV_CACHE_LAYOUT=HND on both sides"
    (cost,) = judge(tmp_path, LLAMA, "tp=2", "tp=1")["costs"]
    assert (cost["page_writes"], cost["many"]) == (1, False)
    _, output = run("doctor", "--model", str(tmp_path), "--prefill", "order=tokens")
    assert "many writes" in output
    assert "Set VLLM_KV_CACHE_LAYOUT=HND on both sides" in output


@pytest.mark.parametrize(
    ("kind", "prefill", "decode", "remedy"),
    [
        ("granite", "tp=2", "", "VLLM_SSM_CONV_STATE_LAYOUT=DS"),
        (
            *("granite", "tp=2,order=tokens", "order=tokens"),
            "VLLM_KV_CACHE_LAYOUT=HND and VLLM_SSM_CONV_STATE_LAYOUT=DS",
        ),
        ("llama", "order=planes,block=64", "order=planes", "--block-size 128"),
        ("llama", "order=tokens", "", "VLLM_KV_CACHE_LAYOUT=HND"),
    ],
)
def test_remedies_are_the_fewest_that_help(
    tmp_path: Path, kind: str, prefill: str, decode: str, remedy: str
) -> None:
    assert judge(tmp_path, CONFIGS[kind], prefill, decode)["remedy"] == f"{remedy} on both sides"


def test_missing_remedy_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair, "scattered", lambda _: (9, 1))
    _, output = run("doctor", "--model", str(write(tmp_path, LLAMA)))
    assert "Start both engines with the same parallelism" in output


# --- Pairs that do not match


@pytest.mark.parametrize(
    ("kind", "prefill", "decode", "words"),
    [
        (
            "llama",
            "dtype=float16",
            "",
            "dtype: prefill engine has float16, decode engine has bfloat16: start both engines",
        ),
        (
            "llama",
            "kv-cache-dtype=fp8",
            "",
            "format: prefill engine has 'float8_e4m3fn, 64 + 64 a head', decode engine has",
        ),
        ("llama", "order=planes", "", "layer model.layers.0.self_attn.attn: format: prefill engine has"),
        ("granite", "conv=DS", "", "a convolution of 3 rows in bfloat16, DS"),
        ("granite", "drafts=2", "", "a convolution of 5 rows"),
        ("llama", "block=16", "block=4096", "blocks of full_attention differ too much: 16 tokens and 4096"),
    ],
)
def test_misfit_is_reported_with_the_planners_message(
    tmp_path: Path, kind: str, prefill: str, decode: str, words: str
) -> None:
    report = judge(tmp_path, CONFIGS[kind], prefill, decode)
    assert not report["fits"]
    assert words in report["problems"][0]
    assert not report["costs"]


@pytest.mark.parametrize(
    ("kind", "side", "words"),
    [
        ("llama", "dcp=2", "does not support --decode-context-parallel-size 2 yet: set it to 1"),
        ("llama", "pcp=2", "does not support --prefill-context-parallel-size 2 yet"),
        ("llama", "dbo=on", "turn --enable-dbo and --ubatch-size off"),
        ("llama", "block=24", "block=24: vLLM's kernels need multiples of 16 on a GPU"),
        ("llama", "block=16,order=planes", "block=16: vLLM's kernels need multiples of 32 on a CPU"),
        ("llama", "tp=3", "tp=3 does not divide 8 attention heads"),
        ("llama", "pp=5", "pp=5 exceeds 4 layers"),
        ("mamba2", "tp=16", "tp=16 does not divide the 8 heads of a Mamba2 state"),
        ("granite", "tp=4", "tp=4 does not divide the 2 groups of a Mamba2 state"),
    ],
)
def test_engines_that_would_not_start_are_refused(tmp_path: Path, kind: str, side: str, words: str) -> None:
    for sides in ((side, ""), ("", side)):
        report = judge(tmp_path, CONFIGS[kind], *sides)
        assert report["problems"][0].startswith(("decode" if sides[1] else "prefill") + " does not start: ")
        assert words in report["problems"][0]


def test_kv_heads_that_ranks_neither_divide_nor_share(tmp_path: Path) -> None:
    config = {**LLAMA, "num_attention_heads": 24, "num_key_value_heads": 6}
    report = judge(tmp_path, config, "tp=4")
    assert report["problems"] == ["prefill does not start: tp=4 and 6 KV heads: neither divides the other"]
    assert judge(tmp_path, config, "tp=12", "tp=3,order=heads")["fits"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"architectures": ["BartModel"], "model_type": "bart"},
            "encoder-decoder models without",
        ),
        ({**LLAMA, "is_encoder_decoder": True}, "encoder-decoder models without connectors"),
        ({"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4"}, "does not move yet"),
    ],
)
def test_models_that_no_pair_can_serve(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    report = judge(tmp_path, config)
    assert words in report["problems"][0]


# --- Other properties of a side


def test_a_drafter_on_decode_alone_costs_drafts(tmp_path: Path) -> None:
    config = {**CONFIGS["deepseek-v2"], "num_nextn_predict_layers": 1}
    both = judge(tmp_path, config, "drafter=mtp", "drafter=mtp")
    alone = judge(tmp_path, config, "", "drafter=mtp")
    assert both["costs"][0]["writes"] == 5 * 256
    assert alone["costs"][0]["writes"] == 4 * 256
    assert "the prefill engine lacks layers of the decode engine's drafter" in alone["notes"][0]
    assert not both["notes"]


def test_draft_model_has_a_separate_configuration(tmp_path: Path) -> None:
    draft = write(tmp_path / "draft", {**LLAMA, "num_hidden_layers": 1, "num_key_value_heads": 2})
    report = judge(tmp_path, LLAMA, f"drafter={draft}", f"tp=2,drafter={draft}/config.json,order=heads")
    # Each rank of the decode engine has two heads of four layers, and one head of the drafter.
    assert {cost["nbytes"] for cost in report["costs"]} == {4096 * (BYTES // 2 + 64 * 2 * 2)}


def test_a_kv_cache_in_fp8_is_half_as_long_and_needs_equal_scales(tmp_path: Path) -> None:
    scheme = {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    for config, side in ((LLAMA, "kv-cache-dtype=fp8"), ({**LLAMA, "quantization_config": scheme}, "")):
        report = judge(tmp_path, config, side, side)
        assert report["kv_bytes_per_token"] == BYTES // 2
        assert "scales of a KV cache in fp8 must be equal" in report["notes"][0]
        assert report["decode"]["kv_cache_dtype"] == "fp8"


def test_a_kernel_that_divides_blocks_makes_more_writes(tmp_path: Path) -> None:
    """The rank's heads are a separate run in every kernel block."""
    (cost,) = judge(tmp_path, LLAMA, "tp=2,order=heads,block=64,kernel=16", "order=heads,block=64")["costs"]
    assert cost["page_writes"] == 2 * 4


def test_data_parallel_engines_are_alike(tmp_path: Path) -> None:
    report = judge(tmp_path, LLAMA, "dp=4", "dp=2")
    assert (report["prefill"]["engines"], report["decode"]["engines"]) == (4, 2)
    assert "is a separate peer" in report["notes"][0]


def test_mamba1_was_never_tried(tmp_path: Path) -> None:
    assert judge(tmp_path, CONFIGS["jamba"])["notes"] == ["Mamba1 was never tested. Compare tokens first"]


def test_the_text_model_of_a_model_of_images_counts(tmp_path: Path) -> None:
    text = {key: value for key, value in LLAMA.items() if key != "architectures"}
    config = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "text_config": text}
    assert judge(tmp_path, config)["layers"] == {"full attention": 4}


def test_hybrid_models_have_blocks_that_hold_their_states(tmp_path: Path) -> None:
    """The numbers are those of Qwen3-Next-80B in vLLM's log."""
    config = {
        **CONFIGS["qwen3-next"],
        **{"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "hidden_size": 2048},
        **{"linear_num_key_heads": 16, "linear_num_value_heads": 32},
        **{"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    }
    assert judge(tmp_path, config, "tp=4", "tp=2")["decode"]["block_tokens"] == 544


def test_it_needs_no_framework_and_no_native_module(tmp_path: Path) -> None:
    absent = "torch", "vllm", "transformers", "kv_connector._native"
    words = ["doctor", "--model", str(write(tmp_path, CONFIGS["granite"])), "--prefill", "tp=2"]
    code = f"import sys; sys.modules.update(dict.fromkeys({absent})); from kv_connector.cli.main import app"
    done = subprocess.run([sys.executable, "-c", f"{code}; app({words})"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Mamba2" in done.stdout


# --- Wrong input


@pytest.mark.parametrize(
    ("side", "words"),
    [
        ("gpus=2", "'gpus=2' is not a key and its value, as in tp=2,block=16. Keys: tp, pp, dp, block"),
        ("tp", "'tp' is not a key and its value"),
        ("tp=two", "tp is 'two', not a number from 1"),
        ("tp=0", "tp is '0', not a number from 1"),
        ("tp=1,tp=2", "tp is given twice"),
        ("order=NHD", "order is 'NHD', not one of tokens, heads, planes"),
        ("dtype=int8", "dtype is 'int8', not one of bfloat16, float16, float32"),
        ("kv-cache-dtype=nvfp4", "not one of bfloat16, float16, float32, fp8"),
        ("conv=ds", "conv is 'ds', not one of SD, DS"),
        ("dbo=1", "dbo is '1', not one of on, off"),
        ("drafter=mtp", "has no layers that predict more tokens (MTP)"),
        ("drafter=nowhere", "nowhere does not exist"),
    ],
)
def test_a_side_that_cannot_be_read(tmp_path: Path, side: str, words: str) -> None:
    for option in ("--prefill", "--decode"):
        status, output = run("doctor", "--model", str(write(tmp_path, LLAMA)), option, side)
        assert status == 2
        assert words in one_line(output)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "config.json does not exist. Give a model's directory, or its config.json"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is nested too deeply"),
        ("[]", "names no `architectures`"),
        ('{"model_type": "llama"}', "names no `architectures`"),
        ('{"architectures": []}', "(model_type None) is unknown"),
        (json.dumps({**LLAMA, "model_type": "lamma"}), "(model_type lamma) is unknown"),
        (json.dumps({**LLAMA, "architectures": ["LlamaModel"]}), "they decide at the handshake"),
        (json.dumps({**LLAMA, "num_hidden_layers": None}), "has no num_hidden_layers: it is incomplete"),
        (json.dumps({**LLAMA, "num_key_value_heads": "2"}), "num_key_value_heads is '2' in llama's"),
        (
            json.dumps({**CONFIGS["gpt-oss"], "layer_types": ["full_attention"]}),
            "types of 1 layers, but 4 layers",
        ),
    ],
)
def test_a_configuration_that_cannot_be_read(tmp_path: Path, text: str | None, words: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    for path in (tmp_path, tmp_path / "config.json"):
        status, output = run("doctor", "--model", str(path))
        assert status == 2
        assert words in one_line(output)


@pytest.mark.parametrize("words", [("--prefill", "tp=2"), ("--tokens", "10")])
def test_a_pairs_options_need_a_model(words: tuple[str, ...]) -> None:
    status, output = run("doctor", *words)
    assert status == 2
    assert f"{words[0]}: only with --model" in one_line(output)


def test_a_machines_options_are_none_of_a_model(tmp_path: Path) -> None:
    status, output = run("doctor", "--model", str(write(tmp_path, LLAMA)), "--require", "tcp")
    assert status == 2
    assert "--require: only without --model" in one_line(output)


def test_help_names_every_key() -> None:
    _, output = run("doctor", "--help")
    for key in KEYS:
        assert f"{key}:" in output
