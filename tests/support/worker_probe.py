"""A worker extension for vLLM: what the tests ask the connector inside an engine's worker process.

vLLM mixes WorkerProbe into its worker (--worker-extension-cls) and calls it over POST /collective_rpc.
"""

import contextlib
import dataclasses
import time
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group

from kv_connector.engine import TransferError

# A test that dies must not leave an engine that waits for ever.
LONGEST_HOLD_SECONDS = 120.0
CRAWLING_LAYER_SECONDS = 0.02


class WorkerProbe:
    def probe_live(self) -> dict[str, Any]:
        """What the agent still has in hand: counts by name."""
        return dataclasses.asdict(_agent().live())

    def probe_stats(self) -> dict[str, Any]:
        """The agent's counters so far, without the delay that metrics have."""
        found = _agent().stats()
        stats = dataclasses.asdict(found)
        ended = {
            f"{side}_{outcome.value}": count
            for side, outcomes in (("sent", found.sent), ("received", found.received))
            for outcome, count in outcomes.items()
        }
        return {name: value for name, value in stats.items() if isinstance(value, int | float)} | ended

    def probe_encoded(self) -> dict[str, int]:
        """Pictures and the like that the engine has made embeddings of, as long as few are cached."""
        return {"inputs": len(self.model_runner.encoder_cache)}  # type: ignore[attr-defined]

    def probe_break_weights(self, problem: str) -> None:
        """From now on no version is applied here, for this reason; empty: they are again."""
        receiver = self.weight_transfer_engine._receiver  # type: ignore[attr-defined]
        vars(receiver).pop("finish", None)
        if problem:
            finish = receiver.finish
            receiver.finish = lambda _, **more: finish(problem, **more)

    def probe_hold(self, layer_calls: str, directory: str, prompts: str = "0") -> None:
        """Stops the forward pass in its `layer_calls`-th layer from now, after that layer was signalled.

        The file `held` in `directory` says that it is reached, and holds the number of pages of open
        transfers that have arrived so far; the file `release` lets the pass go on. From there on it and
        those after it crawl until the agent has so many `prompts` to push: between the passes is when
        vLLM's scheduler takes in requests, and a small model is computed faster than they reach it.
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

    def probe_unhold(self) -> None:
        """Takes back a hold that was not reached."""
        get_kv_transfer_group().__dict__.pop("save_kv_layer", None)


def _agent() -> Any:
    group = get_kv_transfer_group()
    # MultiConnector's first, where it is one.
    return getattr(group, "sub_connectors", [group])[0].worker.agent


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
        with contextlib.suppress(TransferError):  # the agent's thread has ended it meanwhile
            arrived += agent._engine.progress(outgoing.number).pages_done
    return arrived
