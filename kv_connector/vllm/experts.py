"""vLLM's expert exchange over kv-connector, where ``KV_CONNECTOR_MOE=1`` is set.

vLLM sends tokens to the ranks of their experts by an all-gather, and sums the results by a reduce-scatter.
A subclass of its manager takes the place of the class and sends each token only to the ranks that own one of
its experts (kv_connector/moe). It leaves a call to vLLM where it cannot take the call.

All ranks must take a call, or none: a rank that runs vLLM's collective waits for all others. Each decision
therefore rests on facts that all ranks know alike: the configuration, the sizes that vLLM exchanged before
the step, element types, and row sizes. The number of rows on one rank is no such fact. Facts that one rank
alone knows are exchanged once, before the first call that depends on them.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kv_connector.moe import metrics
from kv_connector.moe.fault import ExchangeError
from kv_connector.moe.group import Exchange, Group, GroupError, GroupSettings
from kv_connector.moe.settings import MAX_COLUMNS, MAX_RANKS
from kv_connector.vllm.internals import (
    EXCHANGE_CLASS,
    ExpertLayer,
    adopt_vllm_logging,
    configured_connectors,
    current_platform,
    exchange_module,
    exchange_problem,
    expert_layers,
    get_current_vllm_config,
    watch_steps,
)

logger = logging.getLogger(__name__)

MOST_TOKENS = 1024
"""Tokens of one rank in a step. The segment grows with the number. Larger steps are prefill."""
_TO_ALL_BYTES = 64
"""A tensor with rows up to this size goes to every rank. Larger rows go only where the token goes."""
_MORE_COLUMNS_BYTES = 256
"""Room in each row for tensors beside activations, their scales, ids and weights."""
_NAMING_SECONDS = 0.25
"""Time in which the watcher of a lost rank has named the rank, after a collective of vLLM failed."""

_ROW_TYPES = {torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2}


def replace_exchange() -> None:
    """Puts the subclass in the place of vLLM's class. Idempotent; communicators that exist keep theirs."""
    module = exchange_module()
    kind = getattr(module, EXCHANGE_CLASS)
    if getattr(kind, "of_kv_connector", False):
        return
    if problem := exchange_problem(kind):
        logger.error("experts: vLLM's %s stays in place: %s", EXCHANGE_CLASS, problem)
        return
    setattr(module, EXCHANGE_CLASS, manager_class(kind))


@dataclass(frozen=True)
class ExchangeSettings:
    """Facts of this engine, from its configuration."""

    rank: int
    ranks: int
    """Ranks that exchange rows, and the number of this one."""
    hidden: int
    experts: int
    """Physical experts. 0: the model's configuration does not name the number."""
    top_k: int
    """Experts of a token. 0: the model's configuration does not name the number."""
    max_tokens: int
    sequence_parallel: bool
    """Each rank of the tensor parallel group has its own tokens."""
    divides_experts: bool
    """Each rank has whole experts of its own (expert parallelism)."""
    device: int | None
    """CUDA ordinal. None: host memory."""
    problem: str = ""
    """The reason why vLLM keeps its exchange, or ""."""


def settings_of(vllm_config: Any, manager: Any) -> ExchangeSettings:
    """The facts for a manager of vLLM. Raises nothing: an obstacle is the field ``problem``."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    sequence_parallel = bool(parallel.use_sequence_parallel_moe)
    rank, ranks = manager.dp_rank, manager.dp_world_size
    if sequence_parallel:
        rank, ranks = manager.rank, manager.world_size
    experts = int(model.get_num_experts())
    if experts and parallel.enable_eplb:
        experts += int(parallel.eplb_config.num_redundant_experts)
    return ExchangeSettings(
        rank=int(rank),
        ranks=int(ranks),
        hidden=int(model.get_hidden_size()),
        experts=experts,
        top_k=int(model.get_num_experts_per_tok()),
        max_tokens=min(MOST_TOKENS, int(vllm_config.scheduler_config.max_num_batched_tokens)),
        sequence_parallel=sequence_parallel,
        # Without sequence parallelism the ranks that exchange rows own only a part of the experts, if there
        # are several tensor parallel ranks: the rows then go to all of them.
        divides_experts=bool(parallel.enable_expert_parallel) and ranks == manager.world_size,
        device=torch.cuda.current_device() if current_platform.is_cuda() else None,
        problem=_configured_problem(vllm_config, manager, ranks),
    )


def _configured_problem(vllm_config: Any, manager: Any, ranks: int) -> str:
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if manager.internode:
        return "the ranks are on several nodes"
    if not 2 <= ranks <= MAX_RANKS:
        return f"{ranks} ranks exchange rows instead of 2 to {MAX_RANKS}"
    if ranks != manager.world_size:
        # vLLM reads the answers of tensor parallel rank 0, which would not know of another's void step.
        return "tensor parallel ranks exchange rows apart, as sequence parallelism is off"
    if not (current_platform.is_cuda() or current_platform.is_cpu()):
        return "the platform is neither CUDA nor a CPU"
    if manager.tcp_store_group is not None or parallel.enable_elastic_ep:
        return "elastic expert parallelism is on (--enable-elastic-ep)"
    if parallel.prefill_context_parallel_size > 1:
        return "prefill context parallelism is on"
    if parallel.pipeline_parallel_size > 1:
        # A stage that is not the last passes its results on before the error of a void step. The stages after
        # it have groups of their own, without a fault, and vLLM drops the errors of the earlier stages.
        return "pipeline parallelism is on"
    if parallel.use_ubatching:
        return "dual batch overlap is on (--enable-dbo)"
    if model.dtype != torch.bfloat16:
        return f"the model computes in {str(model.dtype).removeprefix('torch.')} instead of bfloat16"
    for name, role in configured_connectors(vllm_config):
        # A step with a lost rank is void, and its error comes after the step. A connector that stores pages
        # layer by layer would have passed on wrong ones by then.
        if name != "MultiConnector" and (name, role) != ("WriteImmConnector", "kv_consumer"):
            return f"the KV connector {name} ({role}) may store pages of a void step"
    return ""


@dataclass(frozen=True)
class _Formed:
    """A group, and the facts that it was formed for."""

    group: Any
    hidden: int
    experts: int
    top_k: int


class ExpertExchange:
    """Dispatch and combine of one manager: takes calls, or reports that vLLM shall serve them.

    All methods but check() and explain() run on the thread of the worker's steps, on all ranks in the same
    order.
    """

    def __init__(
        self,
        settings: ExchangeSettings,
        exchange: Exchange,
        *,
        form: Callable[[GroupSettings, Exchange], Any] = Group.form,
        layers: Callable[[], Sequence[ExpertLayer]] = expert_layers,
    ) -> None:
        """Collective. Forms the group of the model's hidden size, where the configuration names all facts."""
        self._settings = settings
        self._exchange = exchange
        self._form = form
        self._layers = layers
        self._said: set[str] = set()
        self._groups: dict[int, _Formed] = {}
        """Formed groups, by hidden size."""
        self._settled: dict[int, str] = {}
        """Hidden sizes whose layers all ranks have compared, with the reason why vLLM serves them, or ""."""
        self._open: tuple[_Formed, tuple[int, ...]] | None = None
        """Group and sizes of the dispatch whose combine is still to come. None: vLLM served the dispatch."""
        problem = _first(self._all(settings.problem))
        if not problem and settings.experts and settings.top_k:
            problem = self._regroup(settings.hidden, settings.experts, settings.top_k)
        self.problem = problem
        """The reason why vLLM serves every call, or ""."""
        if problem:
            logger.warning("experts: vLLM's own exchange stays in use: %s", problem)

    def _all(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order. Collective."""
        return [json.loads(one) for one in self._exchange(json.dumps(value).encode())]

    def _regroup(self, hidden: int, experts: int, top_k: int) -> str:
        """Forms the group of a hidden size anew. Collective. Returns why it failed, or ""."""
        if (old := self._groups.pop(hidden, None)) is not None:
            _close(old)
        own = self._settings
        try:
            settings = GroupSettings(
                rank=own.rank,
                ranks=own.ranks,
                hidden=hidden,
                top_k=top_k,
                experts=experts,
                max_tokens=own.max_tokens,
                row_bytes=2 * hidden + 12 * top_k + _MORE_COLUMNS_BYTES,
                device=own.device,
            )
            self._groups[hidden] = _Formed(self._form(settings, self._exchange), hidden, experts, top_k)
        except ExchangeError:
            raise  # vLLM's group cannot be used any more
        except (GroupError, ValueError) as error:
            return str(error)
        logger.info(
            "experts: rank %d of %d exchanges rows of %d elements over kv-connector",
            own.rank,
            own.ranks,
            hidden,
        )
        return ""

    def _settle(self, hidden: int, top_k: int) -> str:
        """Compares the layers of a hidden size on all ranks, and places their experts. Collective."""
        layers: list[ExpertLayer] = []
        try:
            layers = [layer for layer in self._layers() if layer.hidden == hidden]
            problem = self._layers_problem(layers, hidden, top_k)
        except Exception as error:  # the other ranks wait for this rank's facts
            logger.exception("experts: the layers of experts cannot be read")
            problem = f"the layers of experts cannot be read: {error}"
        facts: dict[str, Any] = {
            "experts": sorted({layer.experts for layer in layers}),
            "top_k": top_k,
            "problem": problem,
        }
        everyones = self._all(facts)
        if problem := _first([one["problem"] for one in everyones]):
            return problem
        if any(one != everyones[0] for one in everyones):
            return "the ranks have different layers of experts"
        (experts,) = facts["experts"]
        formed = self._groups.get(hidden)
        if (formed is None or (formed.experts, formed.top_k) != (experts, top_k)) and (
            problem := self._regroup(hidden, experts, top_k)
        ):
            return problem
        owners = _linear_owners(experts, self._settings.ranks) if self._settings.divides_experts else None
        self._groups[hidden].group.place(owners)
        return ""

    def _layers_problem(self, layers: Sequence[ExpertLayer], hidden: int, top_k: int) -> str:
        """The obstacle in this rank's layers, or ""."""
        if not layers:
            return f"no layer of experts has rows of {hidden} elements"
        if len({layer.experts for layer in layers}) > 1:
            return "the layers have different numbers of experts"
        for layer in layers:
            if layer.top_k != top_k:
                return f"a layer with {layer.top_k} experts a token sends {top_k} ids a token"
            if layer.results != hidden:
                return f"a kernel returns {layer.results} elements of rows of {hidden}"
            if layer.dtype != torch.bfloat16:
                return f"a layer computes in {str(layer.dtype).removeprefix('torch.')} instead of bfloat16"
            if not self._settings.divides_experts:
                continue
            if layer.scales_whole_tensor:
                return "a kernel computes one scale for all rows, and some rows hold old bytes"
            own = self._settings
            if (layer.rank, layer.ranks) != (own.rank, own.ranks):
                return "the experts are divided among other ranks than the rows"
            owners = _linear_owners(layer.experts, own.ranks)
            if layer.local != tuple(e for e, owner in enumerate(owners) if owner == own.rank):
                return "the experts are not placed in linear blocks"
        return ""

    def dispatch(
        self,
        rows: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        more: Sequence[torch.Tensor] | None,
        sizes: Sequence[int],
        sequence_parallel: bool,
    ) -> tuple[Any, ...] | None:
        """Returns what vLLM's dispatch returns. None: vLLM serves the call, on all ranks alike."""
        self._open = None
        columns = [*(more or ())]
        if reason := self._reason(rows, weights, ids, columns, sizes, sequence_parallel):
            self.pass_on(reason)
            return None
        small = [index for index, column in enumerate(columns) if _row_bytes(column) <= _TO_ALL_BYTES]
        large = [index for index in range(len(columns)) if index not in small]
        formed = self._groups[rows.shape[1]]
        got = formed.group.dispatch(
            rows,
            ids,
            weights,
            scales=[columns[index] for index in large],
            extras=[columns[index] for index in small],
            sizes=sizes,
        )
        metrics.taken()
        self._open = formed, tuple(sizes)
        if more is None:
            return got.x, got.weights, got.ids
        gathered = dict(zip((*large, *small), (*got.scales, *got.extras), strict=True))
        return got.x, got.weights, got.ids, [gathered[index] for index in range(len(columns))]

    def _reason(
        self,
        rows: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        columns: Sequence[torch.Tensor],
        sizes: Sequence[int],
        sequence_parallel: bool,
    ) -> str:
        """Why vLLM shall serve a dispatch, or "". From facts that all ranks know alike."""
        if self.problem:
            return "configuration"
        if sequence_parallel != self._settings.sequence_parallel:
            return "ranks"
        if rows.dtype not in _ROW_TYPES or ids.dtype not in (torch.int32, torch.int64):
            return "dtype"
        if any(tensor.dim() != 2 for tensor in (rows, weights, ids)):
            return "shape"
        if 3 + len(columns) > MAX_COLUMNS:
            return "columns"
        hidden, top_k = rows.shape[1], ids.shape[1]
        if hidden not in self._settled:
            if _captures(rows):
                return "first call in a CUDA graph"
            self._settled[hidden] = self._settle(hidden, top_k)
            if problem := self._settled[hidden]:
                logger.warning("experts: vLLM's own exchange serves rows of %d elements: %s", hidden, problem)
        if self._settled[hidden]:
            return "layer"
        formed = self._groups[hidden]
        if not top_k == weights.shape[1] == formed.top_k:
            return "top_k"
        row_bytes = sum(_row_bytes(tensor) for tensor in (rows, weights, ids, *columns))
        if not formed.group.fits(sizes, row_bytes):
            return "size"
        return ""

    def pass_on(self, reason: str) -> None:
        """Counts a call that vLLM serves. Each reason is logged once."""
        metrics.passed(reason)
        if reason not in self._said:
            self._said.add(reason)
            logger.info("experts: vLLM's own exchange serves calls for the reason: %s", reason)

    def forget(self) -> None:
        """vLLM serves a dispatch, and so its combine."""
        self._open = None

    def takes_combine(self) -> bool:
        """Returns whether this class served the dispatch whose combine comes next."""
        return self._open is not None

    def combine_input(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """Memory for the results of all rows, from which combine needs no copy. None: use other memory."""
        assert self._open is not None
        formed, sizes = self._open
        if dtype != torch.bfloat16 or tuple(shape) != (sum(sizes), formed.hidden):
            return None
        buffer: torch.Tensor = formed.group.combine_buffer(sizes)
        return buffer

    def combine(self, results: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Sums the results of this rank's tokens over all ranks, into ``out`` where it is given."""
        assert self._open is not None
        (formed, sizes), self._open = self._open, None
        own = sizes[self._settings.rank]
        buffer = formed.group.combine_buffer(sizes)
        if results.shape != buffer.shape or results.dtype != buffer.dtype:
            raise GroupError(
                f"experts: a layer returns {tuple(results.shape)} {results.dtype} for a dispatch of "
                f"{tuple(buffer.shape)} {buffer.dtype}. Unset KV_CONNECTOR_MOE for this model."
            )
        if results.data_ptr() != buffer.data_ptr() or not results.is_contiguous():
            buffer.copy_(results)
        sums = out
        if out is None or not out.is_contiguous() or out.dtype != torch.bfloat16:
            sums = torch.empty((own, buffer.shape[1]), dtype=buffer.dtype, device=results.device)
        formed.group.combine(sums, sizes)
        if out is not None and sums is not out:
            return out.copy_(sums)
        assert sums is not None
        return sums

    def check(self) -> None:
        """Raises GroupError with the name of the rank, if a step was void. One native call a group.

        On any thread: with async scheduling vLLM completes outputs on a thread of its own.
        """
        for formed in tuple(self._groups.values()):
            formed.group.raise_fault()

    def explain(self, error: BaseException) -> BaseException:
        """The error that names a lost rank, or the given error.

        A rank's end also breaks vLLM's collectives, and their errors name no rank. Waits a moment for the
        watcher, because both see the end at the same time. The engine ends in either case.
        """
        if isinstance(error, GroupError) or not self._groups:
            return error
        deadline = time.monotonic() + _NAMING_SECONDS
        while True:
            for formed in tuple(self._groups.values()):
                if lost := sorted(formed.group.lost):
                    return GroupError(
                        f"experts: lost rank {', '.join(map(str, lost))} of {self._settings.ranks}: {error}"
                    )
            if time.monotonic() > deadline:
                return error
            time.sleep(0.01)

    def close(self) -> None:
        """Frees the groups. The error of a group that does not come to rest is logged. Idempotent."""
        self._open = None
        while self._groups:
            _close(self._groups.popitem()[1])
        self.problem = self.problem or "closed"


def _close(formed: _Formed) -> None:
    """Raises nothing: the other ranks may wait for this rank's next message."""
    try:
        formed.group.close()
    except (GroupError, OSError, RuntimeError) as error:
        logger.warning("experts: the group of rows of %d elements stays open: %s", formed.hidden, error)


def _linear_owners(experts: int, ranks: int) -> list[int]:
    """The rank of each expert. The ranks have consecutive blocks, and the first ranks the longer ones."""
    block, longer = divmod(experts, ranks)
    return [rank for rank in range(ranks) for _ in range(block + (rank < longer))]


def _row_bytes(tensor: torch.Tensor) -> int:
    nbytes: int = math.prod(tensor.shape[1:]) * tensor.element_size()
    return nbytes


def _captures(tensor: torch.Tensor) -> bool:
    return bool(tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def _first(problems: Sequence[str]) -> str:
    """The first problem that a rank has, with its rank where not all ranks have it."""
    for rank, problem in enumerate(problems):
        if problem:
            return problem if all(one == problem for one in problems) else f"rank {rank}: {problem}"
    return ""


def _exchange_over(process_group: Any) -> Exchange:
    """All-gather of bytes over a gloo group of torch."""

    def exchange(message: bytes) -> list[bytes]:
        messages: list[Any] = [None] * process_group.size()
        torch.distributed.all_gather_object(messages, message, group=process_group)
        return messages

    return exchange


def manager_class(base: Any) -> type:
    """A subclass of vLLM's manager whose dispatch and combine go over kv-connector where they can."""

    class KvConnectorAll2AllManager(base):  # type: ignore[misc]  # vLLM is not typed for mypy
        of_kv_connector = True

        def __init__(self, cpu_group: Any, tcp_store_group: Any = None) -> None:
            super().__init__(cpu_group, tcp_store_group)
            adopt_vllm_logging()  # vLLM configures its loggers after it has loaded its plugins
            config = get_current_vllm_config()
            settings = settings_of(config, self)
            process_group = cpu_group if settings.sequence_parallel else self.dp_group.cpu_group
            self.experts = ExpertExchange(settings, _exchange_over(process_group))
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
            """Rows without ids go to all ranks, which is vLLM's own way."""
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
