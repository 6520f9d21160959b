"""Weights for an engine that a program runs itself: an ``AsyncLLM`` or an ``LLM``, such as in a Ray actor.

Engines under vLLM's API server need none of this: endpoint.py starts their controller.

    os.environ["KV_CONNECTOR_WEIGHTS"] = '{"control_port": 5800}'
    llm = LLM(MODEL, weight_transfer_config={"backend": "write_imm"})
    with WeightTaker(llm) as weights:
        while True:
            version = weights.take(timeout=600)   # between two calls of generate()
            llm.generate(...)

or, with ``AsyncLLM``, whose requests go on over an update:

    controller = await serve_weights(async_llm)
    ...
    controller.close()
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from kv_connector.protocol.wire.weight_version import shown
from kv_connector.vllm.internals import WeightTransferUpdateRequest
from kv_connector.vllm.plugin import CONNECTOR, KEEP_CACHE, WEIGHTS
from kv_connector.vllm.process import adopt_vllm_logging, default_host, pause_keeping_requests
from kv_connector.weights.controller import Controller, PausableEngine, VersionOutcome
from kv_connector.weights.launch import launch_controller
from kv_connector.weights.settings import SETTINGS_VARIABLE, weight_settings


class NotTaken(RuntimeError):
    """The engine does not serve the version that was pushed last. The message has the reason.

    ``torn``: the engine has parts of two versions. Do not generate before take() has returned a version.
    """

    def __init__(self, reason: str, *, torn: bool) -> None:
        super().__init__(reason)
        self.torn = torn


async def serve_weights(engine: Any) -> Controller:
    """Lets trainers update an ``AsyncLLM``, whose requests go on over an update.

    Call it once, on the event loop that uses the engine. Returns when trainers can connect and, with
    ``seed_from``, the engine is seeded. The caller closes the controller. Raises ValueError if the engine was
    not started for this, or its settings are wrong, and TimeoutError if no worker answers.
    """
    config = engine.vllm_config
    _check(config)
    return await start_controller(AsyncEngine(engine), config)


async def start_controller(
    engine: PausableEngine, config: Any, ended: Callable[[str, VersionOutcome], None] | None = None
) -> Controller:
    """Starts the controller of an engine with vLLM's configuration ``config``, and has the engine seeded.

    ``ended`` is called with each version that a trainer or another engine has had it apply, and the outcome.
    """
    adopt_vllm_logging()
    given = weight_settings(os.environ, config.device_config.device_type)
    parallel = config.parallel_config
    if parallel.data_parallel_size_local != parallel.data_parallel_size:
        raise ValueError(
            f"weights reach all data-parallel ranks of an engine through one API server, but only "
            f"{parallel.data_parallel_size_local} of {parallel.data_parallel_size} ranks run on its "
            "host. Run all ranks on one host, without --data-parallel-rank and "
            "--data-parallel-hybrid-lb, or start several engines"
        )
    if not given.clear_cache:
        _check_connector(config.kv_transfer_config)
    return await launch_controller(
        engine,
        given,
        default_host(),
        ranks=parallel.world_size,
        replicas=parallel.data_parallel_size,
        dummy=config.load_config.load_format == "dummy",
        ended=ended,
    )


def _check(config: Any) -> None:
    backend = getattr(config.weight_transfer_config, "backend", None)
    if backend != WEIGHTS:
        raise ValueError(
            f"this engine's backend for weights is {backend!r}. Start it with "
            f'weight_transfer_config={{"backend": "{WEIGHTS}"}}'
        )


def _check_connector(transfer: Any) -> None:
    """Refuses other connectors: they may keep KV under hashes that they read before an update."""
    if transfer is not None and transfer.kv_connector not in (None, CONNECTOR):
        raise ValueError(
            f"{SETTINGS_VARIABLE}: clear_cache: false keeps no cache of the KV connector "
            f"{transfer.kv_connector}. Leave the setting out, or start the engine with {CONNECTOR} alone"
        )


class AsyncEngine:
    """vLLM's engine client, with the operations that the controller needs."""

    def __init__(self, client: Any) -> None:
        """Reads the setting ``clear_cache``. Raises SettingsError."""
        self._client = client
        device_type = client.vllm_config.device_config.device_type
        self._clear_cache = weight_settings(os.environ, device_type).clear_cache

    async def pause(self) -> None:
        # If the cache is cleared, frozen requests are computed anew with the new weights, and so are cached
        # prefixes.
        await pause_keeping_requests(self._client, clear_cache=self._clear_cache)

    async def update(self, version: str) -> None:
        await self._client.start_weight_update()
        try:
            await self._client.update_weights(WeightTransferUpdateRequest({"version": version}))
        finally:
            await self._client.finish_weight_update()

    async def label(self, version: str) -> None:
        if not self._clear_cache:
            # After the update: if no worker has taken the version, all KV stays valid.
            await self._client.engine_core.call_utility_async(KEEP_CACHE, version)
        await self._client.update_weight_version(shown(version))

    async def resume(self) -> None:
        await self._client.resume_generation()


class WeightTaker:
    """Takes new versions for an ``LLM``, in the calls of take() alone.

    A version lands while generate() runs. The engine applies it in take() alone, so that no request sees two
    versions. Use it from the LLM's thread.
    """

    def __init__(self, llm: Any) -> None:
        """Returns when trainers can connect, and the engine is seeded if ``seed_from`` is set. BLOCKS.

        Raises as serve_weights() does.
        """
        config = llm.llm_engine.vllm_config
        _check(config)
        self._llm = llm
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        """Operations of the controller, for the thread of the LLM."""
        self._updating = False
        self._ended: tuple[str, VersionOutcome] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvc-weights-taker", daemon=True)
        self._thread.start()
        starting = asyncio.run_coroutine_threadsafe(start_controller(self, config, self._end), self._loop)
        starting.add_done_callback(lambda _: self._work.put(lambda: None))
        try:
            # A seed is applied by this thread, as any version is.
            while not starting.done():
                self._work.get()()
            self._controller = starting.result()
        except BaseException:
            self._stop()
            raise
        self._ended = None

    def take(self, timeout: float) -> str | None:
        """Returns the name of the version that the engine now serves, or None after ``timeout`` s. BLOCKS.

        With a timeout of 0 it takes a version only if its trainer has already asked for that. An update that
        has begun is completed, whatever the timeout. Raises NotTaken if the version cannot be served.
        """
        end = time.monotonic() + timeout
        while self._ended is None:
            left = None if self._updating else max(0.0, end - time.monotonic())
            try:
                work = self._work.get(timeout=left)
            except queue.Empty:
                return None
            work()
        (version, outcome), self._ended = self._ended, None
        if outcome.problem:
            raise NotTaken(f"version {shown(version)}: {outcome.problem}", torn=outcome.torn)
        return shown(version)

    def close(self) -> None:
        """Ends the controller. The engine keeps its weights."""
        self._controller.close()
        self._stop()

    def __enter__(self) -> WeightTaker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stop(self) -> None:
        async def cancel() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(cancel(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _end(self, version: str, outcome: VersionOutcome) -> None:
        def end() -> None:
            self._updating = False
            self._ended = version, outcome

        self._work.put(end)

    async def _by_owner(self, operation: Callable[[], None]) -> None:
        done: Future[None] = Future()

        def work() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                operation()
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        self._work.put(work)
        await asyncio.wrap_future(done)

    # --- The controller's operations. The LLM computes nothing while they run, as take() runs them.

    async def pause(self) -> None:
        def pause() -> None:
            # All of these were computed with the weights that go.
            self._llm.llm_engine.reset_mm_cache()
            self._llm.llm_engine.reset_encoder_cache()
            # Without reset_connector, an offloading connector keeps KV of the weights that go.
            if not self._llm.reset_prefix_cache(reset_connector=True):
                raise RuntimeError("the prefix cache is in use. Call take() between two calls of generate()")
            # From now on the cache must stay empty until the version is applied.
            self._updating = True

        await self._by_owner(pause)

    async def update(self, version: str) -> None:
        def update() -> None:
            self._llm.start_weight_update()
            try:
                self._llm.update_weights(WeightTransferUpdateRequest({"version": version}))
            finally:
                self._llm.finish_weight_update()

        await self._by_owner(update)

    async def label(self, version: str) -> None:
        await self._by_owner(lambda: self._llm.update_weight_version(shown(version)))

    async def resume(self) -> None:
        """Does nothing: the LLM computes nothing outside generate()."""
