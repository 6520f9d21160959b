"""The controller of an engine that takes weights, in SGLang's server process.

SGLang runs it as a warmup (``--warmups``), before the server listens for requests.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import fastapi
import torch

from kv_connector.protocol.wire.weight_version import shown
from kv_connector.sglang import internals
from kv_connector.sglang.plugin import RID
from kv_connector.sglang.settings import read_weight_settings
from kv_connector.weights.controller import VersionOutcome
from kv_connector.weights.launch import launch_controller

logger = logging.getLogger("kv_connector")

# SGLang says that compiling a grammar takes up to 20 s. A request that waits for it keeps the cache in use.
# Transfers of prefill and decode engines have this time to end.
_IDLE_S = 60.0
_RETRY_S = 0.1


async def serve_weights(manager: Any) -> None:
    """Starts the controller, for SGLang's TokenizerManager.

    Returns when trainers can connect and, with ``seed_from``, the engine is seeded. Raises ValueError if the
    server was not started for this, or its settings are wrong, and TimeoutError if no worker answers.
    """
    internals.check_weight_options()
    ranks = internals.tensor_ranks()
    given = read_weight_settings(os.environ, internals.device_type())
    manager.auto_create_handle_loop()
    server = PausableServer(manager, ranks, disaggregated=internals.is_disaggregated())
    # The manager lives as long as its process, and so does the controller.
    manager.kv_connector_weights = await launch_controller(
        server,
        given,
        internals.own_host(),
        ranks=ranks,
        dummy=internals.has_dummy_weights(),
        ended=server.ended,
    )


class PausableServer:
    """SGLang's TokenizerManager, with the operations that the controller needs.

    While the server is torn, it refuses new requests with status 503. They would wait until a trainer pushes
    the next version.
    """

    def __init__(self, manager: Any, ranks: int, *, disaggregated: bool) -> None:
        """Replaces methods of the manager, which SGLang's HTTP server calls. ``disaggregated``: the server
        is a prefill or a decode server."""
        self._manager = manager
        self._ranks = ranks
        self._disaggregated = disaggregated
        self._paused = False
        """pause() has succeeded. A torn engine is paused once more, for the next version."""
        self._torn = ""
        """The reason why new requests are refused. Empty: they are not."""
        self._tried = ""
        """Identity of the last version of which the workers may have parts. Empty: they have none."""
        manager.generate_request = self._guarded(manager.generate_request)
        manager.create_abort_task = self._checked(manager.create_abort_task)
        manager.continue_generation = self._noted(manager.continue_generation)

    def _guarded(self, generate: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
        """Replaces ``generate_request``. A probe of SGLang's health waits as during any pause, and fails."""

        def guarded(obj: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            probes = isinstance(obj.rid, str) and obj.rid.startswith(internals.HEALTH_CHECK_RID_PREFIX)
            return self._refuse() if self._torn and not probes else generate(obj, *args, **kwargs)

        return guarded

    def _checked(self, create: Callable[..., Any]) -> Callable[..., Any]:
        """Replaces ``create_abort_task``. SGLang calls it before it begins to answer with a stream, of which
        ``/generate`` calls generate_request() later, when the status has been sent."""

        def checked(*args: Any, **kwargs: Any) -> Any:
            self._check()
            return create(*args, **kwargs)

        return checked

    def _noted(self, resume: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        """Replaces ``continue_generation``, which an operator may call, too: with parts of two versions."""

        async def noted(*args: Any, **kwargs: Any) -> None:
            await resume(*args, **kwargs)
            self._paused, self._torn = False, ""

        return noted

    def _check(self) -> None:
        # SGLang's OpenAI API answers 400 for a ValueError.
        if self._torn:
            raise fastapi.HTTPException(503, self._torn)

    async def _refuse(self) -> AsyncIterator[Any]:
        self._check()
        yield

    def ended(self, version: str, outcome: VersionOutcome) -> None:
        """The controller reports the outcome of a version."""
        if outcome.torn:
            earlier = self._manager.config_value("weight_version")
            version = self._tried or version
            self._torn = (
                f"this server has parts of the weight versions {shown(version)} and {earlier}, and is paused "
                f"until it gets a whole version. Push or seed one. {outcome.problem}"
            )

    async def pause(self) -> None:
        """Pauses the schedulers, and drops all KV.

        SGLang computes the running requests of a decode engine, or of an engine that prefills and decodes by
        itself, anew after the pause. Prefill and decode engines end their transfers first, see Settling.
        Raises RuntimeError if the cache stays in use. An engine that is paused already is not resumed in
        between: late requests are aborted.
        """
        deadline = time.monotonic() + _IDLE_S
        while True:
            settles = self._disaggregated and not self._paused
            asked = internals.PauseGenerationReqInput(mode="retract", rid=RID if settles else None)
            await self._manager.pause_generation(asked)
            # Without a limit SGLang answers at once.
            limit = max(deadline - time.monotonic(), 0.0) if settles else None
            if (flushed := await self._manager.flush_cache(limit)).success:
                self._paused = True
                return
            if time.monotonic() >= deadline:
                raise RuntimeError(f"SGLang's cache was in use for {_IDLE_S:g} s ({flushed.message})")
            if self._paused:
                self._manager.abort_request(RID, abort_all=True)
            else:
                await self.resume()
            await asyncio.sleep(_RETRY_S)

    async def update(self, version: str) -> None:
        begun, reason = await self._manager.begin_weight_update(
            internals.BeginWeightUpdateReqInput(selector="target")
        )
        if not begun:
            logger.error("weights: SGLang began no update: %s", reason)
            return
        self._tried = version
        named = internals.MultiprocessingSerializer.serialize([(version, torch.empty(0))])
        updated, reason = await self._manager.update_weights_from_tensor(
            internals.UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=[named] * self._ranks,
                load_format=internals.LOADER,
                flush_cache=False,  # pause() has emptied it
                selector="target",
            )
        )
        if not updated:
            logger.error("weights: SGLang did not call its workers' loader: %s", reason)
        ended, reason = await self._manager.end_weight_update(internals.EndWeightUpdateReqInput())
        if not ended:
            raise RuntimeError(f"SGLang did not end the update: {reason}")

    async def label(self, version: str) -> None:
        await self._manager.update_weight_version(
            internals.UpdateWeightVersionReqInput(new_version=shown(version), abort_all_requests=False)
        )
        self._tried = ""

    async def resume(self) -> None:
        await self._manager.continue_generation(internals.ContinueGenerationReqInput())
