"""ExpertExchange: dispatch and combine of one manager.

It decides which calls go over kv-connector, and has their groups.
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
from kv_connector.moe.fault import ExchangeError, first_problem
from kv_connector.moe.group import Exchange, Group, GroupError, GroupSettings
from kv_connector.moe.settings import MAX_COLUMNS, linear_owners
from kv_connector.vllm.experts.layers import ExpertLayer, expert_layers
from kv_connector.vllm.experts.settings import ExchangeSettings

logger = logging.getLogger(__name__)


_TO_ALL_BYTES = 64
"""Bytes. A tensor with rows up to this size goes to every rank. Larger rows go only where the token goes."""
_MORE_COLUMNS_BYTES = 256
"""Room in each row for tensors beside activations, their scales, ids and weights."""
_NAMING_SECONDS = 0.25
"""Seconds in which the watcher names a lost rank, after a collective of vLLM failed."""
_ROW_TYPES = {torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2}


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
        """Collective. Forms the group of the model's hidden size, if the configuration names all facts."""
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
        problem = first_problem(self._all(settings.problem))
        if not problem and settings.experts and settings.top_k:
            problem = self._regroup(settings.hidden, settings.experts, settings.top_k)
        self.problem = problem
        """The reason why vLLM serves every call, or ""."""
        if problem:
            logger.warning("experts: vLLM's own exchange stays in use: %s", problem)

    def _all(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, in rank order. Collective."""
        return [json.loads(one) for one in self._exchange(json.dumps(value).encode())]

    def _regroup(self, hidden: int, experts: int, top_k: int) -> str:
        """Forms the group of a hidden size anew. Collective. Returns why it failed, or ""."""
        if (old := self._groups.pop(hidden, None)) is not None:
            _close(old)
        own = self._settings
        row_bytes = 2 * hidden + 12 * top_k + _MORE_COLUMNS_BYTES
        # The ranks' GPUs may differ in memory.
        max_tokens = min(self._all(own.tokens_for(row_bytes + 2 * hidden)))
        try:
            settings = GroupSettings(
                rank=own.rank,
                ranks=own.ranks,
                hidden=hidden,
                top_k=top_k,
                experts=experts,
                max_tokens=max_tokens,
                row_bytes=row_bytes,
                device=own.device,
            )
            self._groups[hidden] = _Formed(self._form(settings, self._exchange), hidden, experts, top_k)
        except ExchangeError:
            raise  # vLLM's group cannot be used any more
        except (GroupError, ValueError) as error:
            return str(error)
        logger.info(
            "experts: rank %d of %d exchanges rows of %d elements over kv-connector, "
            "in steps of up to %d tokens a rank",
            own.rank,
            own.ranks,
            hidden,
            max_tokens,
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
        if problem := first_problem([one["problem"] for one in everyones]):
            return problem
        if any(one != everyones[0] for one in everyones):
            return "the ranks have different layers of experts"
        (experts,) = facts["experts"]
        formed = self._groups.get(hidden)
        if (formed is None or (formed.experts, formed.top_k) != (experts, top_k)) and (
            problem := self._regroup(hidden, experts, top_k)
        ):
            return problem
        owners = linear_owners(experts, self._settings.ranks) if self._settings.divides_experts else None
        self._groups[hidden].group.place(owners)
        return ""

    def _layers_problem(self, layers: Sequence[ExpertLayer], hidden: int, top_k: int) -> str:
        """Returns the obstacle in this rank's layers, or ""."""
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
            owners = linear_owners(layer.experts, own.ranks)
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
        """Returns the reason why vLLM shall serve a dispatch, or "".

        It uses only facts that all ranks know alike.
        """
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
            logger.info("experts: vLLM's own exchange serves some calls, for this reason: %s", reason)

    def forget(self) -> None:
        """Notes that vLLM serves a dispatch, and so its combine."""
        self._open = None

    def takes_combine(self) -> bool:
        """Returns whether this class served the dispatch whose combine comes next."""
        return self._open is not None

    def combine_input(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """Returns memory for the results of all rows, from which combine needs no copy.

        None: use other memory.
        """
        assert self._open is not None
        formed, sizes = self._open
        if dtype != torch.bfloat16 or tuple(shape) != (sum(sizes), formed.hidden):
            return None
        buffer: torch.Tensor = formed.group.combine_buffer(sizes)
        return buffer

    def combine(self, results: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Sums the results of this rank's tokens over all ranks, into ``out`` if it is given."""
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
        """Raises GroupError with the name of the rank, if a step was void.

        Makes one native call for each group.

        Any thread may call it: with async scheduling vLLM completes outputs on a separate thread.
        """
        for formed in tuple(self._groups.values()):
            formed.group.raise_fault()

    def explain(self, error: BaseException) -> BaseException:
        """Returns the error that names a lost rank, or the given error.

        The end of a rank also breaks vLLM's collectives, and their errors name no rank. Waits a moment for
        the watcher, because both see the end at the same time. The engine ends in either case.
        """
        if isinstance(error, GroupError) or not self._groups:
            return error
        deadline = time.monotonic() + _NAMING_SECONDS
        while True:
            for formed in tuple(self._groups.values()):
                if reason := formed.group.explanation():
                    own = self._settings
                    return GroupError(f"experts: rank {own.rank} of {own.ranks}: {reason}: {error}")
            if time.monotonic() > deadline:
                return error
            time.sleep(0.01)

    def close(self) -> None:
        """Frees the groups. Logs the error of a group that does not come to rest. Idempotent."""
        self._open = None
        while self._groups:
            _close(self._groups.popitem()[1])
        self.problem = self.problem or "closed"


def _close(formed: _Formed) -> None:
    """Closes a group. Raises nothing: the other ranks may wait for this rank's next message."""
    try:
        formed.group.close()
    except (GroupError, OSError, RuntimeError) as error:
        logger.warning("experts: the group for rows of %d elements stays open: %s", formed.hidden, error)


def _row_bytes(tensor: torch.Tensor) -> int:
    nbytes: int = math.prod(tensor.shape[1:]) * tensor.element_size()
    return nbytes


def _captures(tensor: torch.Tensor) -> bool:
    return bool(tensor.is_cuda and torch.cuda.is_current_stream_capturing())
