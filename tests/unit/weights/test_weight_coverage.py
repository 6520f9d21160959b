"""An engine takes no version that leaves a part of a model behind, unless the trainer names that part."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from typer.testing import CliRunner, Result
from weight_engines import Load, WeightEngine, drawn, loads

from kv_connector.cli.main import app
from kv_connector.engine import ErrorCode, TransferError
from kv_connector.weights.mapping.coverage import not_loaded
from kv_connector.weights.mapping.geometry import Geometry, Parameter, Tensor, Write
from kv_connector.weights.mapping.plan import PlanError
from kv_connector.weights.pusher import WeightPusher
from kv_connector.weights.sources import SourceError, TensorSource, module_source
from kv_connector.weights.wire.links import Links

PATIENCE_S = 30


def cut(rank: int, ranks: int, tensors: Sequence[Tensor]) -> Geometry:
    """A loader that narrows what is too large: it takes the first 8 columns of `up` and no `norm`."""
    whole = loads(rank, ranks, tensors)
    (up, down, _) = whole.writes
    up = msgspec.structs.replace(up, extent=(up.extent[0], 8), strides=(8, 1))
    return msgspec.structs.replace(
        whole,
        parameters=(msgspec.structs.replace(whole.parameters[0], elements=up.elements), whole.parameters[1]),
        writes=(up, down),
        constants=(),
    )


def without_norm(rank: int, ranks: int, tensors: Sequence[Tensor]) -> Geometry:
    whole = loads(rank, ranks, tensors)
    return msgspec.structs.replace(whole, parameters=whole.parameters[:2], writes=whole.writes[:2])


def keeping(*kept: str, unset: Sequence[str] = ()) -> Load:
    def load(rank: int, ranks: int, tensors: Sequence[Tensor]) -> Geometry:
        """Loads as usual. Only the second worker keeps parameters."""
        names = kept if rank == ranks - 1 else ()
        return msgspec.structs.replace(
            loads(rank, ranks, tensors), kept=names, unset=tuple(name for name in names if name in unset)
        )

    return load


@pytest.fixture
def engines() -> Iterator[list[WeightEngine]]:
    engines: list[WeightEngine] = []
    yield engines
    for engine in engines:
        engine.close()


def push(engine: WeightEngine, *partial: str) -> None:
    with WeightPusher(TensorSource(drawn(1)), [str(engine.address)], partial=partial) as pusher:
        pusher.connect()
        pusher.push("v1").wait("applied", PATIENCE_S)


def test_a_tensor_that_the_engine_cuts_is_refused_by_name(engines: list[WeightEngine]) -> None:
    """A checkpoint may have larger matrices, of which vLLM's loaders take the first rows."""
    engines.append(engine := WeightEngine(2, load=cut))
    cuts = r"up \[31, 20\] \(248 of 620 elements\), norm \[3, 1\] \(0 of 3 elements\)"
    with pytest.raises(PlanError, match=rf"{engine.address} would not load all of {cuts}"):
        push(engine)
    with pytest.raises(PlanError, match=r"would not load all of norm"):
        push(engine, "up")
    assert engine.served == ["", ""]
    push(engine, "up", "n*m")
    assert engine.served == ["v1", "v1"]


def test_a_parameter_that_no_tensor_fills_is_refused_by_name(engines: list[WeightEngine]) -> None:
    names = [f"layers.{number}.e_score_correction_bias" for number in range(5)]
    engines.append(engine := WeightEngine(2, load=keeping(*names)))
    some = ", ".join(names[:3])
    with pytest.raises(PlanError, match=rf"{engine.address} would keep the old {some} and 2 more: push them"):
        push(engine)
    assert engine.served == ["", ""]
    push(engine, "*.e_score_correction_bias")
    assert engine.served == ["v1", "v1"]


def test_a_parameter_of_a_dummy_engine_is_sent_in_any_case(engines: list[WeightEngine]) -> None:
    engines.append(engine := WeightEngine(2, load=keeping("vision.proj", "bias", unset=["vision.proj"])))
    with pytest.raises(PlanError, match=r"dummy weights, and no tensor fills its vision\.proj"):
        push(engine, "*")


def test_a_seed_keeps_what_the_joiner_has_and_nothing_random(engines: list[WeightEngine]) -> None:
    """The seeding engine sends only the trainer's tensors."""
    fleet = WeightEngine(2, load=keeping("frozen"))
    started, dummy = (
        WeightEngine(1, load=keeping("frozen")),
        WeightEngine(1, load=keeping("frozen", unset=["frozen"])),
    )
    smaller = WeightEngine(1, load=cut)
    engines += [fleet, started, dummy, smaller]
    push(fleet, "frozen")

    def seed(joiner: WeightEngine) -> Result:
        asked = ["weights", "seed", "--from", str(fleet.address), "--engine", str(joiner.address)]
        return CliRunner().invoke(app, asked)

    assert seed(started).exit_code == 0
    assert started.served == ["v1"]
    for joiner, words in (
        (dummy, "dummy weights, and no tensor fills its frozen"),
        (smaller, "of up [31, 20]"),
    ):
        done = seed(joiner)
        assert done.exit_code == 1
        assert words in done.output
        assert joiner.served == [""]


def test_a_seed_may_lack_what_the_trainer_named(engines: list[WeightEngine]) -> None:
    engines += [fleet := WeightEngine(2, load=without_norm), joiner := WeightEngine(1, load=without_norm)]
    push(fleet, "norm")
    asked = ["weights", "seed", "--from", str(fleet.address), "--engine", str(joiner.address)]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    assert joiner.served == ["v1"]


def test_a_push_that_is_served_succeeds_although_its_own_engine_ends_with_an_error(
    engines: list[WeightEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines.append(engine := WeightEngine(1))
    save_file(dict(drawn(1)), tmp_path / "model.safetensors")
    close = WeightPusher.close

    def hangs(pusher: WeightPusher) -> None:
        close(pusher)
        raise TransferError(ErrorCode.TIMEOUT, "nvlink", "", "close", "its GPU hangs")

    monkeypatch.setattr(WeightPusher, "close", hangs)
    done = CliRunner().invoke(app, ["weights", "push", str(tmp_path), "--engine", str(engine.address)])
    assert done.exit_code == 0, done.output
    assert "its GPU hangs" in done.output
    assert len(engine.served) == 1


def test_a_push_that_fails_gives_its_reason_to_the_engines(
    engines: list[WeightEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines.append(engine := WeightEngine(1))
    save_file(dict(drawn(1)), tmp_path / "model.safetensors")
    reasons: list[str] = []
    monkeypatch.setattr(Links, "end_all", lambda _, reason: reasons.append(reason))

    def fails(*_: object) -> None:
        raise TransferError(ErrorCode.TIMEOUT, "tcp", "", "push", "no word")

    monkeypatch.setattr(WeightPusher, "push", fails)
    done = CliRunner().invoke(app, ["weights", "push", str(tmp_path), "--engine", str(engine.address)])
    assert done.exit_code != 0
    assert "no word" in reasons[0]


def test_the_commands_name_what_is_left_out(engines: list[WeightEngine], tmp_path: Path) -> None:
    engines.append(
        engine := WeightEngine(2, load=lambda *given: msgspec.structs.replace(cut(*given), kept=("bias",)))
    )
    save_file(dict(drawn(1)), tmp_path / "model.safetensors")
    where = [str(tmp_path), "--engine", str(engine.address)]
    up, norm, bias = ([*("--partial", name)] for name in ("up", "norm", "bias"))
    for command in ("push", "plan", "bench"):
        done = CliRunner().invoke(app, ["weights", command, *where])
        assert done.exit_code == 2
        assert "up [31, 20] (248 of 620 elements)" in done.output
    assert (
        "would keep the old bias" in CliRunner().invoke(app, ["weights", "push", *where, *up, *norm]).output
    )
    done = CliRunner().invoke(app, ["weights", "push", *where, *up, *norm, *bias])
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(app, ["weights", "verify", *where, *up, *norm, *bias])
    assert done.exit_code == 0, done.output
    for named, words in (
        ([*up, *norm], "would keep the old bias"),
        ([*up, *bias], "would not load all of norm"),
    ):
        done = CliRunner().invoke(app, ["weights", "verify", *where, *named])
        assert done.exit_code == 1
        assert words in done.output


# --- Trainers' buffers


class Routed(torch.nn.Module):
    """A mixture of experts as in transformers: the biases of its routers are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(4, 2, bias=False)
        self.gate.register_buffer("bias_of_experts", torch.ones(2))
        self.register_buffer("inverse_frequencies", torch.ones(2), persistent=False)


def test_a_modules_persistent_buffers_are_sent() -> None:
    module = Routed()
    source = module_source(module, rename=lambda name: f"model.{name}")
    assert [tensor.name for tensor in source.tensors()] == ["model.gate.weight", "model.gate.bias_of_experts"]
    module.gate.bias_of_experts.add_(2)
    source.refresh()
    assert source.held()[1].local().tolist() == [3.0, 3.0]


def test_a_buffer_that_was_replaced_is_refused_by_name() -> None:
    """Without the error the old buffer's values would be sent for ever."""
    module = Routed()
    source = module_source(module)
    module.gate.bias_of_experts = module.gate.bias_of_experts + 1
    with pytest.raises(SourceError, match=r"gate\.bias_of_experts .* another tensor"):
        source.refresh()


def test_routers_biases_of_glm_are_sent() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Glm4MoeConfig(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        vocab_size=64,
    )
    model = transformers.Glm4MoeForCausalLM(config)
    names = {tensor.name for tensor in module_source(model).tensors()}
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in names
    assert not any("inv_freq" in name for name in names), "it is not in checkpoints"


# --- What is covered


@given(st.data())
def test_not_loaded_counts_each_element_once(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=3)))
    marked = torch.zeros(shape, dtype=torch.bool)
    workers = []
    for _ in range(data.draw(st.integers(0, 3))):
        writes = []
        for _ in range(data.draw(st.integers(0, 3))):
            start = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
            extent = tuple(data.draw(st.integers(1, n - a)) for a, n in zip(start, shape, strict=True))
            marked[tuple(slice(a, a + n) for a, n in zip(start, extent, strict=True))] = True
            writes.append(Write(0, 0, start, extent, 0, (0,) * len(shape)))
        workers.append(Geometry((Parameter("p", "float32", 1),), tuple(writes), ()))
    tensor, loaded = Tensor("t", "float32", shape), int(marked.sum())
    expected = [(tensor, loaded)] if loaded < math.prod(shape) else []
    assert list(not_loaded([tensor], workers)) == expected


def test_rows_of_a_step_cost_no_more_than_their_number() -> None:
    """A loader that takes every other row has a box for each row, as with interleaved gate and up."""
    rows = 1 << 14
    tensor = Tensor("gate_up", "bfloat16", (rows, 64))
    halves = [
        Geometry(
            (Parameter("p", "bfloat16", rows * 32),),
            tuple(Write(0, 0, (row, 0), (1, 64), 0, (64, 1)) for row in range(first, rows, 2)),
            (),
        )
        for first in (0, 1)
    ]
    assert list(not_loaded([tensor], halves)) == []
    assert list(not_loaded([tensor], halves[:1])) == [(tensor, rows * 32)]
