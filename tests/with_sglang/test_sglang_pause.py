"""The controller's operations on SGLang's server process, without a server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from fastapi import HTTPException
from sglang.srt.entrypoints import http_server as api
from sglang.srt.entrypoints.openai import serving_chat, serving_completions
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion
from sglang.srt.entrypoints.openai.serving_embedding import OpenAIServingEmbedding
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput

from kv_connector.protocol.wire.weight_version import identity
from kv_connector.sglang import internals
from kv_connector.sglang.plugin import LOADER, RID
from kv_connector.sglang.weights import serving, worker
from kv_connector.sglang.weights.loader import take
from kv_connector.sglang.weights.serving import PausableServer
from kv_connector.weights.controller import VersionOutcome

pytestmark = pytest.mark.anyio
VERSION = identity("step-1", "contents")


@dataclass
class Manager:
    """A stand-in for SGLang's TokenizerManager.

    ``busy``: flushes that find the cache in use. ``begun``, ``updated``, ``ended``: the results of an update.
    """

    busy: int = 0
    begun: bool = True
    updated: bool = True
    ended: bool = True
    calls: list[str] = field(default_factory=list)
    applied: list[str] = field(default_factory=list)

    async def pause_generation(self, asked: Any) -> None:
        delayed = " delayed" * (asked.rid == RID)
        self.calls.append(f"pause {asked.mode}{delayed}")

    async def continue_generation(self, asked: Any) -> None:
        self.calls.append("resume")

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        self.calls.append(f"abort {rid} {abort_all}")

    def config_value(self, field: str) -> str:
        return {"weight_version": "step-0"}[field]

    async def generate_request(self, asked: Any, request: object = None) -> AsyncIterator[Any]:
        yield f"answer to {asked.rid}"

    def create_abort_task(self, asked: Any) -> None:
        self.calls.append(f"answer with a stream {asked.rid}")

    async def flush_cache(self, timeout_s: float | None = None) -> Any:
        self.busy -= 1
        self.calls.append("flush" if timeout_s is None else "flush later")
        if timeout_s is not None:
            assert 0 < timeout_s <= serving._IDLE_S
        return SimpleNamespace(success=self.busy < 0, message="requests are queued")

    async def begin_weight_update(self, asked: Any) -> tuple[bool, str]:
        self.calls.append(f"begin {asked.selector}")
        return self.begun, "an update is open"

    async def update_weights_from_tensor(self, asked: Any) -> tuple[bool, str]:
        """Calls the loader of each rank, as SGLang does."""
        self.calls.append(f"update {asked.selector}")
        assert (asked.load_format, asked.flush_cache, asked.abort_all_requests) == (LOADER, False, False)
        model = SimpleNamespace(kv_connector_weights=SimpleNamespace(apply=self.applied.append))
        for payload in asked.serialized_named_tensors:
            take(model, internals.MultiprocessingSerializer.deserialize(payload))  # type: ignore[arg-type]
        return self.updated, "a derived cache"

    async def end_weight_update(self, asked: Any) -> tuple[bool, str]:
        self.calls.append("end")
        return self.ended, "no update is open"

    async def update_weight_version(self, asked: Any) -> None:
        self.calls.append(f"label {asked.new_version} {asked.abort_all_requests}")


async def test_pause_drops_all_kv() -> None:
    manager = Manager()
    await PausableServer(manager, 1, disaggregated=False).pause()
    assert manager.calls == ["pause retract", "flush"]


async def test_pause_waits_until_the_cache_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that SGLang prepares, such as its grammar, is ready only if the schedulers run."""
    monkeypatch.setattr(serving, "_RETRY_S", 0.0)
    manager = Manager(busy=2)
    await PausableServer(manager, 1, disaggregated=False).pause()
    assert manager.calls == ["pause retract", "flush", "resume"] * 2 + ["pause retract", "flush"]


async def test_pause_of_a_prefill_or_decode_engine_waits_for_its_transfers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serving, "_RETRY_S", 0.0)
    manager = Manager(busy=1)
    await PausableServer(manager, 1, disaggregated=True).pause()
    once = ["pause retract delayed", "flush later"]
    assert manager.calls == [*once, "resume", *once]


@pytest.mark.parametrize("disaggregated", [False, True])
async def test_pause_of_a_paused_engine_never_resumes_it(
    disaggregated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workers may have two versions. After resume(), it is like a new one."""
    monkeypatch.setattr(serving, "_RETRY_S", 0.0)
    manager = Manager()
    server = PausableServer(manager, 1, disaggregated=disaggregated)
    await server.pause()
    manager.busy = 1
    manager.calls.clear()
    await server.pause()
    assert manager.calls == ["pause retract", "flush", f"abort {RID} True", "pause retract", "flush"]
    await server.resume()
    manager.busy = 1
    manager.calls.clear()
    await server.pause()
    assert "resume" in manager.calls
    assert f"abort {RID} True" not in manager.calls


async def test_pause_fails_if_the_cache_stays_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_IDLE_S", 0.0)
    with pytest.raises(RuntimeError, match=r"SGLang's cache was in use for 0 s \(requests are queued\)"):
        await PausableServer(Manager(busy=100), 1, disaggregated=False).pause()


async def test_update_calls_the_loader_of_each_rank_with_the_version() -> None:
    manager = Manager()
    await PausableServer(manager, 2, disaggregated=False).update(VERSION)
    assert manager.applied == [VERSION, VERSION]
    assert manager.calls == ["begin target", "update target", "end"]


async def test_version_is_reported_by_its_name_and_aborts_no_request() -> None:
    manager = Manager()
    await PausableServer(manager, 1, disaggregated=False).label(VERSION)
    assert manager.calls == ["label step-1 False"]


TORN = VersionOutcome("worker 1: it did not try", torn=True)
REFUSED = "503: this server has parts of the weight versions step-1 and step-0, .* worker 1: it did not try"


async def answer_of(manager: Manager, rid: str | None = None) -> str:
    """Raises HTTPException if the manager refuses the request."""
    answer: str = await anext(manager.generate_request(SimpleNamespace(rid=rid)))
    return answer


async def test_server_with_parts_of_two_versions_refuses_new_requests() -> None:
    """They would wait for the next push, which may never begin."""
    manager = Manager()
    server = PausableServer(manager, 2, disaggregated=True)
    await server.pause()
    assert await answer_of(manager, "before") == "answer to before"
    server.ended(VERSION, VersionOutcome("version step-1 has not landed at 2 workers"))
    assert await answer_of(manager) == "answer to None"
    server.ended(VERSION, TORN)
    with pytest.raises(HTTPException, match=REFUSED):
        await answer_of(manager)
    with pytest.raises(HTTPException, match=REFUSED):
        manager.create_abort_task(SimpleNamespace(rid="torn"))
    server.ended(VERSION, VersionOutcome("a version that has not landed changes nothing"))
    with pytest.raises(HTTPException, match=REFUSED):
        await answer_of(manager)
    await server.pause()
    await server.resume()
    server.ended(VERSION, VersionOutcome())
    assert await answer_of(manager, "after") == "answer to after"
    manager.create_abort_task(SimpleNamespace(rid="after"))
    assert manager.calls[-1] == "answer with a stream after"


async def test_probe_of_a_torn_server_fails_as_during_any_pause() -> None:
    """SGLang calls generate_request() in a task whose exception it never retrieves."""
    manager = Manager()
    PausableServer(manager, 1, disaggregated=False).ended(VERSION, TORN)
    probe = f"{internals.HEALTH_CHECK_RID_PREFIX}_7"
    assert await answer_of(manager, probe) == f"answer to {probe}"


async def test_server_that_an_operator_resumes_refuses_nothing() -> None:
    manager = Manager()
    server = PausableServer(manager, 1, disaggregated=True)
    await server.pause()
    server.ended(VERSION, TORN)
    await manager.continue_generation("an operator's")
    assert await answer_of(manager, "resumed") == "answer to resumed"
    manager.calls.clear()
    await server.pause()
    assert manager.calls == ["pause retract delayed", "flush later"], "transfers end first"


async def test_torn_server_names_the_version_that_its_workers_tried() -> None:
    """The pause for a later one may fail."""
    manager = Manager()
    server = PausableServer(manager, 1, disaggregated=False)
    await server.update(VERSION)
    server.ended(identity("step-2", "contents"), TORN)
    with pytest.raises(HTTPException, match=REFUSED):
        await answer_of(manager)
    await server.label(VERSION)
    manager.begun = False
    await server.update(identity("step-2", "contents"))
    server.ended(identity("step-2", "contents"), TORN)
    with pytest.raises(HTTPException, match="parts of the weight versions step-2 and step-0"):
        await answer_of(manager)


API = [
    ("/generate", {"text": "a"}),
    ("/generate", {"text": "a", "stream": True}),
    ("/encode", {"text": "a"}),
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/completions", {"prompt": "a", "stream": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "stream": True}),
    ("/v1/embeddings", {"input": "a"}),
]


@pytest.mark.parametrize(("path", "asked"), API)
async def test_sglangs_api_answers_503_while_the_server_is_torn(
    path: str, asked: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = Manager()
    PausableServer(manager, 1, disaggregated=False).ended(VERSION, TORN)
    monkeypatch.setattr(api, "_global_state", SimpleNamespace(tokenizer_manager=manager))
    for module in (serving_chat, serving_completions):
        given = SimpleNamespace(stream_response_default_include_usage=False)
        monkeypatch.setattr(module, "get_serving", lambda given=given: given)
    logged = SimpleNamespace(log_requests=False)
    for name, kind, made in (
        ("chat", OpenAIServingChat, GenerateReqInput),
        ("completion", OpenAIServingCompletion, GenerateReqInput),
        ("embedding", OpenAIServingEmbedding, EmbeddingReqInput),
    ):
        handler: Any = kind.__new__(kind)  # type: ignore[type-abstract]
        vars(handler).update(
            tokenizer_manager=SimpleNamespace(
                generate_request=manager.generate_request,
                create_abort_task=manager.create_abort_task,
                request_logger=logged,
            ),
            _validate_request=lambda request: None,
            _should_return_input_ids=lambda request: False,
            _should_return_output_ids=lambda request: False,
            _convert_to_internal_request=lambda request, raw, made=made: (made(text="a"), request),
        )
        monkeypatch.setattr(api.app.state, f"openai_serving_{name}", handler, raising=False)
    transport = httpx.ASGITransport(app=api.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        answer = await client.post(path, json={"model": "m"} | asked if "v1" in path else asked)
    assert answer.status_code == 503
    assert "parts of the weight versions step-1 and step-0" in answer.text
    assert not manager.calls, "SGLang prepares the abort of a stream"


@pytest.mark.parametrize(
    ("refuses", "calls", "logged"),
    [
        ({"begun": False}, ["begin target"], "SGLang began no update: an update is open"),
        ({"updated": False}, ["begin target", "update target", "end"], "call its workers' loader: a derived"),
    ],
)
async def test_refused_update_is_left_to_the_workers_states(
    refuses: dict[str, bool], calls: list[str], logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An exception would leave the engine paused."""
    manager = Manager(**refuses)  # type: ignore[arg-type]
    await PausableServer(manager, 1, disaggregated=False).update(VERSION)
    assert manager.calls == calls
    assert logged in caplog.text


async def test_update_that_does_not_end_leaves_the_engine_paused() -> None:
    with pytest.raises(RuntimeError, match="SGLang did not end the update: no update is open"):
        await PausableServer(Manager(ended=False), 1, disaggregated=False).update(VERSION)


async def test_worker_knows_the_version_of_which_its_engine_has_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reports: list[Any] = []
    for name in ("UpdatableModel", "WorkerPlace", "apply_version", "read_weight_settings"):
        monkeypatch.setattr(worker, name, lambda *given: SimpleNamespace(name="weights/0", record=None))
    for name in ("tensor_rank", "tensor_ranks", "own_host"):
        monkeypatch.setattr(worker, name, lambda: 0)
    monkeypatch.setattr(worker, "start_receiver", lambda *given: reports.append(given[-1]))
    first = worker.WeightWorker(torch.nn.Module(), torch.device("cpu"))
    (report,) = reports
    first.apply(VERSION)
    report("")
    assert not first.torn
    report("the update failed")
    assert first.torn
    assert first.tried == "", "this worker has tried none since"
    first.apply(VERSION)
    report("worker 1: it did not try to apply the version")
    assert first.torn
    assert first.tried == VERSION
    first.apply("step-2#00000000")
    assert not first.torn, "the next version has landed whole"


@pytest.mark.parametrize(
    ("given", "recomputes"), [({}, True), ({"api_key": "key"}, False), ({"ssl_certfile": "file"}, False)]
)
async def test_retracted_requests_are_computed_again_over_plain_http(
    given: dict[str, str], recomputes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = SimpleNamespace(**{"api_key": None, "ssl_certfile": None} | given)
    monkeypatch.setattr(internals, "get_serving", lambda: serving)
    assert internals.recomputes_retracted() is recomputes
