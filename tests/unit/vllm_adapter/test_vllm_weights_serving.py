"""Weights for an engine that a program runs itself: when its thread applies them, and what it refuses."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from kv_connector.protocol.wire.weight_version import identity
from kv_connector.vllm.internals import release
from kv_connector.vllm.plugin import CONNECTOR, KEEP_CACHE
from kv_connector.vllm.weights import serving
from kv_connector.vllm.weights.serving import NotTaken, WeightTaker, serve_weights
from kv_connector.weights.controller import VersionOutcome

PATIENCE_S = 60.0


def config(backend: str = "write_imm") -> SimpleNamespace:
    return SimpleNamespace(weight_transfer_config=SimpleNamespace(backend=backend))


@dataclass
class Llm:
    """Notes the calls that it gets, and from which thread."""

    calls: list[str] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)
    cache_in_use: bool = False
    paused: Callable[[], None] = lambda: None
    backend: str = "write_imm"

    def __post_init__(self) -> None:
        self.llm_engine = SimpleNamespace(
            vllm_config=config(self.backend),
            reset_mm_cache=lambda: self._note("reset_mm_cache"),
            reset_encoder_cache=lambda: self._note("reset_encoder_cache"),
        )

    def _note(self, call: str) -> None:
        self.calls.append(call)
        self.threads.add(threading.get_ident())

    def reset_prefix_cache(self, *, reset_connector: bool = False) -> bool:
        self._note(f"reset_prefix_cache, connector: {reset_connector}")
        self.paused()
        return not self.cache_in_use

    def start_weight_update(self) -> None:
        self._note("start")

    def update_weights(self, request: Any) -> None:
        self._note(f"update {request.update_info['version']}")

    def finish_weight_update(self) -> None:
        self._note("finish")

    def update_weight_version(self, version: str) -> None:
        self._note(f"label {version}")


@dataclass
class Controller:
    """Stands in for the controller: a trainer's update, step by step."""

    engine: WeightTaker
    ended: Callable[[str, VersionOutcome], None]
    loop: asyncio.AbstractEventLoop
    closed: bool = False

    def close(self) -> None:
        self.closed = True

    def begin(
        self, version: str, outcome: VersionOutcome | None = None, *, before: threading.Event | None = None
    ) -> None:
        """Starts an update and returns. It waits for ``before`` between the pause and the update."""

        async def run() -> None:
            try:
                await self.engine.pause()
                if before is not None:
                    await asyncio.to_thread(before.wait, PATIENCE_S)
                await self.engine.update(version)
                await self.engine.label(version)
                await self.engine.resume()
                self.ended(version, outcome or VersionOutcome())
            except Exception as error:
                self.ended(version, VersionOutcome(str(error)))

        asyncio.run_coroutine_threadsafe(run(), self.loop)


@pytest.fixture
def controllers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Controller]]:
    found: list[Controller] = []

    async def start(engine: WeightTaker, _: Any, ended: Callable[[str, VersionOutcome], None]) -> Controller:
        found.append(Controller(engine, ended, asyncio.get_running_loop()))
        return found[-1]

    monkeypatch.setattr(serving, "start_controller", start)
    yield found
    assert all(one.closed for one in found)


def test_a_version_is_applied_by_the_thread_that_takes_it(controllers: list[Controller]) -> None:
    llm = Llm()
    with WeightTaker(llm) as weights:
        assert weights.take(timeout=0) is None
        controllers[0].begin("7")
        assert not llm.calls  # the program may be in generate()
        assert weights.take(timeout=PATIENCE_S) == "7"
        assert llm.calls == [
            "reset_mm_cache",
            "reset_encoder_cache",
            "reset_prefix_cache, connector: True",
            "start",
            "update 7",
            "finish",
            "label 7",
        ]
        assert llm.threads == {threading.get_ident()}
        assert weights.take(timeout=0) is None


def test_no_time_limit_ends_an_update_that_has_begun(controllers: list[Controller]) -> None:
    """The program would otherwise fill the prefix cache with results of the old weights."""
    llm, goes_on = Llm(), threading.Event()
    llm.paused = threading.Timer(0.2, goes_on.set).start
    with WeightTaker(llm) as weights:
        controllers[0].begin("7", before=goes_on)
        while (taken := weights.take(timeout=0.01)) is None:
            assert not llm.calls
        assert taken == "7"


@pytest.mark.parametrize("torn", [False, True])
def test_a_version_that_is_not_served_is_an_error(controllers: list[Controller], torn: bool) -> None:
    with WeightTaker(Llm()) as weights:
        controllers[0].begin("7", VersionOutcome("worker 0: it broke", torn=torn))
        with pytest.raises(NotTaken, match="version 7: worker 0: it broke") as raised:
            weights.take(timeout=PATIENCE_S)
        assert raised.value.torn == torn
        controllers[0].begin("8")
        assert weights.take(timeout=PATIENCE_S) == "8"


def test_weights_do_not_change_under_requests(controllers: list[Controller]) -> None:
    llm = Llm(cache_in_use=True)
    with WeightTaker(llm) as weights:
        controllers[0].begin("7")
        with pytest.raises(NotTaken, match=r"the prefix cache is in use\. Call take\(\) between two calls"):
            weights.take(timeout=PATIENCE_S)
    assert "start" not in llm.calls


def test_a_program_that_ends_in_mid_update_is_not_held_up(controllers: list[Controller]) -> None:
    with WeightTaker(Llm()):
        controllers[0].begin("7")


def test_an_engine_with_another_backend_is_refused() -> None:
    expected = (
        r"backend for weights is 'nccl'\. Start it with weight_transfer_config=\{\"backend\": \"write_imm\"\}"
    )
    with pytest.raises(ValueError, match=expected):
        WeightTaker(Llm(backend="nccl"))
    with pytest.raises(ValueError, match=expected):
        asyncio.run(serve_weights(SimpleNamespace(vllm_config=config("nccl"))))


def test_a_start_that_fails_raises_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(*_: Any) -> Controller:
        raise TimeoutError("no worker answers")

    monkeypatch.setattr(serving, "start_controller", start)
    before = threading.active_count()
    with pytest.raises(TimeoutError, match="no worker answers"):
        WeightTaker(Llm())
    assert threading.active_count() == before


class Client:
    """vLLM's engine client. It notes the calls that it gets."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.renderer = self.engine_core = self
        self.vllm_config = SimpleNamespace(device_config=SimpleNamespace(device_type="cpu"))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(*words: object, **arguments: object) -> None:
            self.calls.append(" ".join(map(str, (name, *words, *arguments.values()))))

        return call


@pytest.mark.parametrize("clear_cache", [True, False])
def test_engine_that_keeps_its_cache_separates_versions_before_it_reports_a_new_one(
    monkeypatch: pytest.MonkeyPatch, clear_cache: bool
) -> None:
    monkeypatch.setenv("KV_CONNECTOR_WEIGHTS", f'{{"clear_cache": {str(clear_cache).lower()}}}')
    client, version = Client(), identity("7", "content")

    async def update() -> None:
        engine = serving.AsyncEngine(client)
        await engine.pause()
        await engine.label(version)

    asyncio.run(update())
    pause, *rest = [call for call in client.calls if call != "clear_mm_cache_async"]
    assert pause == f"{release.PAUSE} keep {clear_cache}"
    kept = [] if clear_cache else [f"call_utility_async {KEEP_CACHE} {version}"]
    assert rest == [*kept, "update_weight_version 7"]


def test_cache_of_another_connector_is_not_kept() -> None:
    for name in (None, CONNECTOR):
        serving._check_connector(SimpleNamespace(kv_connector=name))
    serving._check_connector(None)
    with pytest.raises(ValueError, match=r"clear_cache: false keeps no cache of the KV connector MultiConne"):
        serving._check_connector(SimpleNamespace(kv_connector="MultiConnector"))
