"""The check of each step for a lost rank, installed around the methods of vLLM's worker."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any

from kv_connector.moe.fault import GroupError
from kv_connector.vllm.internals import AsyncModelRunnerOutput, get_tensor_model_parallel_rank

logger = logging.getLogger(__name__)


def watch_steps(
    vllm_config: Any,
    check: Callable[[], None],
    explain: Callable[[BaseException], BaseException],
    close: Callable[[], None],
) -> None:
    """Has this process's worker call ``check()`` when the output of a step is complete.

    ``explain(error)`` names the cause of an error that a step raised. ``close()`` runs at the worker's end. A
    second call in the same process replaces the callables of the first. vLLM must have made its tensor
    parallel group. If vLLM would drop a GroupError, the worker's process ends instead, and so the engine.
    """
    module, _, name = vllm_config.parallel_config.worker_cls.rpartition(".")
    kind = getattr(importlib.import_module(module), name)
    watch = kind.__dict__.get("_kv_connector_watch")
    if watch is None:
        watch = kind._kv_connector_watch = _StepWatch()
        for method in ("execute_model", "sample_tokens", "execute_dummy_batch"):
            setattr(kind, method, watch.around(getattr(kind, method)))
        kind.shutdown = watch.before_end(kind.shutdown)
    watch.check, watch.explain, watch.close = check, explain, close
    watch.ends_process = _drops_errors(vllm_config)


def _drops_errors(vllm_config: Any) -> bool:
    """Returns whether the engine ignores the answers of this worker. It then only logs an error of a step.

    The executor of several processes reads only the answers of tensor parallel rank 0 in the last pipeline
    stage. If the worker went on, the other ranks would wait in a collective that this rank never joins, until
    VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS are over.
    """
    parallel = vllm_config.parallel_config
    return bool(parallel.distributed_executor_backend == "mp" and get_tensor_model_parallel_rank() > 0)


class _StepWatch:
    """Wraps the methods of a worker class with the callables of watch_steps()."""

    check: Callable[[], None]
    explain: Callable[[BaseException], BaseException]
    close: Callable[[], None]
    ends_process = False

    def around(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def watched(*args: Any, **kwargs: Any) -> Any:
            try:
                output = self.named(functools.partial(step, *args, **kwargs))
                if isinstance(output, AsyncModelRunnerOutput):
                    return _WatchedOutput(output, self)
                self.check()
            except GroupError as error:
                if not self.ends_process:
                    raise
                logger.error("experts: this worker shuts down: %s", error)
                raise SystemExit(f"experts: {error}") from error
            return output

        return watched

    def before_end(self, end: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(end)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.close()
            return end(*args, **kwargs)

        return watched

    def named(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:
            cause = self.explain(error)
            if cause is error:
                raise
            raise cause from error


class _WatchedOutput(AsyncModelRunnerOutput):  # type: ignore[misc]  # vLLM is not typed for mypy
    """The output of a step that still runs on the GPU. Its results are complete once get_output() returns."""

    def __init__(self, output: Any, watch: _StepWatch) -> None:
        self._output = output
        self._watch = watch

    def get_output(self) -> Any:
        output = self._watch.named(self._output.get_output)
        self._watch.check()
        return output

    def get_kv_connector_output(self) -> Any:
        """Returns the wrapped output's value. 0.33 salvages it if get_output() fails."""
        return self._output.get_kv_connector_output()
