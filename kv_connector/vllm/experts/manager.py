"""The subclass of vLLM's manager of expert exchanges, and its installation in vLLM's module."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch

from kv_connector.moe.group import exchange_over
from kv_connector.vllm.experts.exchange import ExpertExchange
from kv_connector.vllm.experts.settings import settings_of
from kv_connector.vllm.experts.step_watch import watch_steps
from kv_connector.vllm.internals import exchange_module, get_current_vllm_config
from kv_connector.vllm.process import adopt_vllm_logging

logger = logging.getLogger(__name__)


EXCHANGE_CLASS = "AgRsAll2AllManager"
_ROWS = ("self", "hidden_states")
_EXCHANGE_METHODS = {
    "__init__": ("self", "cpu_group", "tcp_store_group"),
    "dispatch": (*_ROWS, "topk_weights", "topk_ids", "is_sequence_parallel", "extra_tensors"),
    "dispatch_router_logits": (*_ROWS, "router_logits", "is_sequence_parallel", "extra_tensors"),
    "combine": (*_ROWS, "is_sequence_parallel"),
    "allocate_combine_input": ("self", "shape", "dtype", "device", "is_sequence_parallel"),
    "combine_into_output": (*_ROWS, "output", "is_sequence_parallel"),
    "destroy": ("self",),
    "_get_comm_group": ("self", "is_sequence_parallel"),
    "_get_sizes": ("self", "num_local_tokens", "comm_group"),
}
"""Parameters of the methods that the subclass overrides or calls. Both supported releases have the same."""


def replace_exchange() -> None:
    """Puts the subclass in the place of vLLM's class. Idempotent.

    Existing communicators keep their managers.
    """
    module = exchange_module()
    kind = getattr(module, EXCHANGE_CLASS)
    if getattr(kind, "of_kv_connector", False):
        return
    if problem := exchange_problem(kind):
        logger.error("experts: vLLM's %s stays in place: %s", EXCHANGE_CLASS, problem)
        return
    setattr(module, EXCHANGE_CLASS, manager_class(kind))


def exchange_problem(kind: type) -> str:
    """Returns the first method of vLLM's exchange whose parameters this package does not know, or ""."""
    for name, known in _EXCHANGE_METHODS.items():
        method = getattr(kind, name, None)
        if method is None:
            return f"it has no method {name}"
        found = tuple(inspect.signature(method).parameters)
        if found != known:
            return f"the parameters of {name} are {', '.join(found)} instead of {', '.join(known)}"
    return ""


def manager_class(base: Any) -> type:
    """Returns a subclass of vLLM's manager whose dispatch and combine go over kv-connector where possible."""

    class KvConnectorAll2AllManager(base):  # type: ignore[misc]  # vLLM is not typed for mypy
        of_kv_connector = True

        def __init__(self, cpu_group: Any, tcp_store_group: Any = None) -> None:
            super().__init__(cpu_group, tcp_store_group)
            adopt_vllm_logging()  # vLLM configures its loggers after it has loaded its plugins
            config = get_current_vllm_config()
            settings = settings_of(config, self)
            process_group = cpu_group if settings.sequence_parallel else self.dp_group.cpu_group
            self.experts = ExpertExchange(settings, exchange_over(process_group))
            if not self.experts.problem:
                watch_steps(config, self.experts.check, self.experts.explain, self.experts.close)

        def dispatch(
            self,
            hidden_states: torch.Tensor,
            topk_weights: torch.Tensor,
            topk_ids: torch.Tensor,
            is_sequence_parallel: bool = False,
            extra_tensors: list[torch.Tensor] | None = None,
        ) -> Any:
            sizes = self._get_sizes(hidden_states.shape[0], self._get_comm_group(is_sequence_parallel))
            taken = self.experts.dispatch(
                hidden_states, topk_weights, topk_ids, extra_tensors, sizes, is_sequence_parallel
            )
            if taken is not None:
                return taken
            return super().dispatch(
                hidden_states, topk_weights, topk_ids, is_sequence_parallel, extra_tensors
            )

        def dispatch_router_logits(
            self,
            hidden_states: torch.Tensor,
            router_logits: torch.Tensor,
            is_sequence_parallel: bool = False,
            extra_tensors: list[torch.Tensor] | None = None,
        ) -> Any:
            """Leaves the call to vLLM, which sends rows without ids to all ranks."""
            self.experts.forget()
            self.experts.pass_on("router logits")
            return super().dispatch_router_logits(
                hidden_states, router_logits, is_sequence_parallel, extra_tensors
            )

        def combine(self, hidden_states: torch.Tensor, is_sequence_parallel: bool = False) -> torch.Tensor:
            if self.experts.takes_combine():
                return self.experts.combine(hidden_states)
            return super().combine(hidden_states, is_sequence_parallel)

        def allocate_combine_input(
            self,
            shape: tuple[int, ...],
            dtype: torch.dtype,
            device: torch.device,
            is_sequence_parallel: bool = False,
        ) -> torch.Tensor | None:
            if self.experts.takes_combine():
                return self.experts.combine_input(shape, dtype)
            return super().allocate_combine_input(shape, dtype, device, is_sequence_parallel)

        def combine_into_output(
            self, hidden_states: torch.Tensor, output: torch.Tensor, is_sequence_parallel: bool = False
        ) -> torch.Tensor:
            if self.experts.takes_combine():
                return self.experts.combine(hidden_states, output)
            return super().combine_into_output(hidden_states, output, is_sequence_parallel)

        def destroy(self) -> None:
            self.experts.close()
            super().destroy()

    return KvConnectorAll2AllManager
