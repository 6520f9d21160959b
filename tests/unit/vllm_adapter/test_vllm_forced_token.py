"""ForcedToken under both of vLLM's interfaces: a request's first token is P's, and no other token changes."""

from __future__ import annotations

import sys
from importlib.util import find_spec, module_from_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality  # noqa: E402
from vllm.v1.sample.logits_processor.interface import LogitsProcessor as V1  # noqa: E402
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as V2  # noqa: E402

from kv_connector.vllm.forced_token import KEY, ForcedToken, force  # noqa: E402

VOCABULARY = 8


def params(token: int | None = None) -> Any:
    made = SimpleNamespace(extra_args={"another": 1})
    if token is not None:
        force(made, token)
    return made


def sampled(processor: ForcedToken, rows: int, ctx: Any = None) -> list[int]:
    """Samples for a model that prefers token 5. Token 3 is masked."""
    logits = torch.zeros(rows, VOCABULARY)
    logits[:, 5] = 9.0
    logits[:, 3] = -float("inf")
    out = processor.apply(logits) if ctx is None else processor.apply(logits, ctx)
    tokens: list[int] = out.argmax(-1).tolist()
    return tokens


def test_it_is_both_runners_processor() -> None:
    assert issubclass(ForcedToken, V1)
    assert issubclass(ForcedToken, V2)


def test_a_vllm_without_the_second_interface_starts_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, V2.__module__, None)
    spec = find_spec(ForcedToken.__module__)
    assert spec is not None
    assert spec.loader is not None
    anew = module_from_spec(spec)
    spec.loader.exec_module(anew)
    assert anew.V2LogitsProcessor is object
    assert not anew.ForcedToken.__abstractmethods__


def test_a_client_cannot_set_it() -> None:
    ForcedToken.validate_params(params())
    ForcedToken.validate_params(SimpleNamespace(extra_args=None))
    with pytest.raises(ValueError, match=KEY):
        ForcedToken.validate_params(params(3))


def test_other_extra_arguments_of_a_request_stay() -> None:
    assert params(3).extra_args == {"another": 1, KEY: 3}


# --- V1


def v1() -> ForcedToken:
    return ForcedToken(None, torch.device("cpu"), False)


def added(row: int, token: int | None, output: list[int]) -> tuple[int, Any, list[int], list[int]]:
    return row, params(token), [1, 2], output


def test_the_first_token_is_forced_and_the_next_is_not() -> None:
    processor, output = v1(), list[int]()
    processor.update_state(BatchUpdate(2, [], [added(0, None, []), added(1, 3, output)], []))
    assert sampled(processor, 2) == [5, 3]
    output.append(-1)  # async scheduling: it is not known yet
    processor.update_state(None)
    assert sampled(processor, 2) == [5, 5]


def test_a_row_that_moves_takes_its_token_along() -> None:
    processor = v1()
    processor.update_state(BatchUpdate(2, [], [added(0, 3, []), added(1, 2, [])], []))
    processor.update_state(BatchUpdate(2, [], [], [(0, 1, MoveDirectionality.SWAP)]))
    assert sampled(processor, 2) == [2, 3]
    processor.update_state(BatchUpdate(1, [0], [], [(1, 0, MoveDirectionality.UNIDIRECTIONAL)]))
    assert sampled(processor, 1) == [3]


def test_a_row_that_is_used_again_has_no_token_of_before() -> None:
    processor = v1()
    processor.update_state(BatchUpdate(1, [], [added(0, 3, [])], []))
    processor.update_state(BatchUpdate(1, [], [added(0, None, [])], []))
    assert sampled(processor, 1) == [5]


def test_a_request_that_was_preempted_goes_on_without_it() -> None:
    processor = v1()
    processor.update_state(BatchUpdate(1, [], [added(0, 3, [3, 4])], []))
    assert sampled(processor, 1) == [5]


def test_a_token_that_the_model_does_not_have_is_left_out() -> None:
    processor = v1()
    processor.update_state(BatchUpdate(1, [], [added(0, VOCABULARY, [])], []))
    assert sampled(processor, 1) == [5]


# --- V2


def v2(*prompt_lengths: int) -> ForcedToken:
    return ForcedToken(None, SimpleNamespace(prompt_len=SimpleNamespace(np=np.array(prompt_lengths))))


def step(slots: list[int], seen: list[int]) -> Any:
    return SimpleNamespace(idx_mapping_np=np.array(slots), seq_lens_upper_bound_np=np.array(seen))


def test_v2_forces_the_token_behind_the_prompt_alone() -> None:
    processor = v2(10, 20, 30)
    assert [processor.add_request(1, params(3)), processor.add_request(2, params())] == [True, False]
    assert sampled(processor, 2, step([2, 1], [30, 16])) == [5, 5]  # its prompt is not whole yet
    assert sampled(processor, 2, step([2, 1], [31, 20])) == [5, 3]
    assert sampled(processor, 2, step([1, 2], [21, 32])) == [5, 5]
    assert sampled(processor, 1, step([1], [20])) == [5], "it was forgotten"


def test_v2_forgets_the_token_of_a_slot_that_is_used_again() -> None:
    processor = v2(10)
    processor.add_request(0, params(3))
    processor.add_request(0, params())
    assert sampled(processor, 1, step([0], [10])) == [5]
