"""A worker extension for vLLM: queries of the tests to the connector inside an engine's worker process.

vLLM mixes WorkerProbe into its worker (--worker-extension-cls) and calls it over POST /collective_rpc.
"""

import contextlib
import ctypes
import dataclasses
import os
import time
from pathlib import Path
from typing import Any, ClassVar

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group

from kv_connector.engine import TransferError
from kv_connector.vllm.connector import WriteImmConnector
from kv_connector.vllm.process import worker_connectors

# Seconds. A test that dies must not leave a stopped engine behind.
LONGEST_HOLD_SECONDS = 120.0
CRAWLING_LAYER_SECONDS = 0.02


class WorkerProbe:
    def probe_live(self) -> dict[str, Any]:
        """Returns what the agent is processing: counts by name."""
        return dataclasses.asdict(_agent().live())

    def probe_stats(self) -> dict[str, Any]:
        """Returns the agent's counters so far, without the delay of metrics."""
        found = _agent().stats()
        stats = dataclasses.asdict(found)
        ended = {
            f"{side}_{outcome.value}": count
            for side, outcomes in (("sent", found.sent), ("received", found.received))
            for outcome, count in outcomes.items()
        }
        checks = {f"checked_{name}": count for name, count in dataclasses.asdict(found.checks).items()}
        return (
            {name: value for name, value in stats.items() if isinstance(value, int | float)} | ended | checks
        )

    def probe_encoded(self) -> dict[str, int]:
        """Returns the number of encoder inputs, such as pictures, with embeddings in the cache, as long as
        few are cached."""
        return {"inputs": len(self.model_runner.encoder_cache)}  # type: ignore[attr-defined]

    def probe_encoder_runs(self) -> dict[str, int]:
        """Returns the number of runs of the picture encoder since the first call."""
        runner = self.model_runner  # type: ignore[attr-defined]
        encode = runner.model.embed_multimodal
        if not hasattr(runner, "probed_runs"):
            runner.probed_runs = 0

            def counted(**inputs: Any) -> Any:
                runner.probed_runs += 1
                return encode(**inputs)

            runner.model.embed_multimodal = counted
        return {"runs": runner.probed_runs}

    def probe_process(self) -> dict[str, int]:
        """Returns the process group of the engine, which a test may stop."""
        return {"group": os.getpgid(0)}

    def probe_break_weights(self, problem: str) -> None:
        """Makes this worker reject every version, for this reason, once its model has it. An empty reason
        ends that."""
        receiver = self.weight_transfer_engine._receiver  # type: ignore[attr-defined]
        vars(receiver).pop("finish", None)
        if problem:
            finish = receiver.finish
            receiver.finish = lambda _, **more: finish(problem, torn=True)

    def probe_hold(self, layer_calls: str, directory: str, prompts: str = "0") -> None:
        """Stops the forward pass in its `layer_calls`-th layer from now, after that layer was signalled.

        The file `held` in `directory` reports the stop, and holds the number of pages of open transfers that
        have arrived so far. The file `release` ends the stop.

        From then on each layer is slow until the agent has `prompts` prompts to push. vLLM's scheduler
        accepts requests between passes, and a small model is computed faster than requests arrive.
        """
        connector = get_kv_transfer_group()
        save_kv_layer = connector.save_kv_layer
        left, wanted = int(layer_calls), int(prompts)

        def save_and_hold(*args: Any, **kwargs: Any) -> None:
            nonlocal left
            save_kv_layer(*args, **kwargs)
            left -= 1
            if left == 0:
                _hold(Path(directory))
            if left > 0:
                return
            if wanted and _agent().live().prefill_requests < wanted:
                time.sleep(CRAWLING_LAYER_SECONDS)
            else:
                del connector.save_kv_layer

        connector.save_kv_layer = save_and_hold

    def probe_hold_lending(self, layer_calls: str, directory: str) -> None:
        """Does the same as probe_hold(), in the next step that lends a prefix, whose pages leave with the
        step's layers. The engine must compute in that step."""
        connector = get_kv_transfer_group()
        save_kv_layer = connector.save_kv_layer
        left = int(layer_calls)

        def save_and_hold(*args: Any, **kwargs: Any) -> None:
            nonlocal left
            save_kv_layer(*args, **kwargs)
            if not connector._get_connector_metadata().after_pages:
                return
            left -= 1
            if left == 0:
                _hold(Path(directory))
                del connector.save_kv_layer

        connector.save_kv_layer = save_and_hold

    def probe_flip_bit(self) -> None:
        """Flips one bit of a page, once the pages of the next transfer have landed and before they are
        summed."""
        summer = _agent()._summer
        whole = summer.sum

        def flip_and_sum(pages: Any, *rest: Any) -> None:
            del summer.sum
            last = pages[-1]
            region, offset = last.layers[-1]
            page = offset + last.blocks[-1] * last.stride + last.runs[-1]
            _flip_bit(summer._memory[region].address + page, self.device)  # type: ignore[attr-defined]
            whole(pages, *rest)

        summer.sum = flip_and_sum

    def probe_unhold(self) -> None:
        """Cancels a hold that was not reached."""
        get_kv_transfer_group().__dict__.pop("save_kv_layer", None)


def _flip_bit(address: int, device: torch.device) -> None:
    if device.type == "cpu":
        ctypes.c_ubyte.from_address(address).value ^= 1
        return

    class Byte:
        __cuda_array_interface__: ClassVar[dict[str, Any]] = {
            "data": (address, False),
            "shape": (1,),
            "typestr": "|u1",
            "version": 3,
        }

    torch.as_tensor(Byte(), device=device).bitwise_xor_(1)
    torch.cuda.synchronize(device)


def _agent() -> Any:
    ours = (one for one in worker_connectors() if isinstance(one, WriteImmConnector))
    worker = next(ours).worker
    assert worker is not None
    return worker.agent


def _hold(directory: Path) -> None:
    deadline = time.monotonic() + LONGEST_HOLD_SECONDS
    while not (directory / "release").exists() and time.monotonic() < deadline:
        (directory / "held.new").write_text(str(_pages_arrived()))
        (directory / "held.new").rename(directory / "held")
        time.sleep(0.005)


def _pages_arrived() -> int:
    agent = _agent()
    arrived = 0
    for outgoing in list(agent._effects.writes.open.values()):
        with contextlib.suppress(TransferError):  # the agent's thread has ended the transfer in the meantime
            arrived += agent._engine.progress(outgoing.number).pages_done
    return arrived
