"""SglangExperts: the groups of one process, and which layers they serve."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kv_connector.moe import metrics
from kv_connector.moe.fault import ExchangeError, first_problem
from kv_connector.moe.group import Dispatched, Exchange, Group, GroupError, GroupSettings
from kv_connector.moe.settings import linear_owners
from kv_connector.sglang.experts.layers import ExpertRank, SglangLayer

logger = logging.getLogger(__name__)

MOST_TOKENS = 1024
"""Tokens of one rank in a step. The segment grows with the number. Larger steps are prefill."""
_NAMING_SECONDS = 0.25
"""Seconds in which the watcher names a lost rank, after a collective of SGLang failed."""


class SglangExperts:
    """The groups of this process, one for each shape of layers.

    Calls come from the thread of the scheduler's steps, on all ranks in the same order.
    """

    def __init__(
        self,
        place: ExpertRank,
        exchange: Exchange,
        *,
        form: Callable[[GroupSettings, Exchange], Any] = Group.form,
    ) -> None:
        self._place = place
        self._exchange = exchange
        self._form = form
        self._served: dict[SglangLayer, LayerExchange | None] = {}
        """Kinds of layers that all ranks have. None: SGLang's exchange serves them."""
        self._groups: dict[tuple[int, int, int], Any] = {}
        """Formed groups, by hidden size, experts and experts of a token."""
        self._said: set[str] = set()

    def layer(self, facts: SglangLayer) -> LayerExchange | None:
        """Returns the exchange of a layer. None: SGLang's own serves it, on all ranks alike.

        Collective: the ranks compare each layer, because only some of them may have layers of a further kind.
        Raises ExchangeError where the ranks cannot agree.
        """
        own = self._place
        problem = own.problem or facts.problem(own.ranks)
        message = {"layer": dataclasses.asdict(facts), "problem": problem}
        everyones = [json.loads(one) for one in self._exchange(json.dumps(message).encode())]
        problem = first_problem([one["problem"] for one in everyones])
        if not problem and any(one != everyones[0] for one in everyones):
            problem = "the ranks have different layers of experts"
        if problem:
            self._warn(facts, problem)
            return None
        if facts not in self._served:  # as on all ranks
            self._served[facts] = self._served_by(facts)
        return self._served[facts]

    def _served_by(self, facts: SglangLayer) -> LayerExchange | None:
        """Returns the exchange of a layer that all ranks have. Collective. None: no group could be formed."""
        shape = facts.hidden, facts.experts, facts.top_k
        if shape not in self._groups and (problem := self._regroup(*shape)):
            self._warn(facts, problem)
            return None
        return LayerExchange(self._groups[shape], facts.no_expert, self._note)

    def _warn(self, facts: SglangLayer, problem: str) -> None:
        """Logs why SGLang's exchange serves a layer, once for each reason and kind of layer."""
        text = f"{_name(facts)}: {problem}"
        if text not in self._said:
            self._said.add(text)
            logger.warning("experts: SGLang's own exchange serves %s", text)

    def _regroup(self, hidden: int, experts: int, top_k: int) -> str:
        """Forms the group of a shape. Collective. Returns why it failed, on all ranks alike, or ""."""
        own = self._place
        try:
            group = self._form(
                GroupSettings(
                    rank=own.rank,
                    ranks=own.ranks,
                    hidden=hidden,
                    top_k=top_k,
                    experts=experts,
                    max_tokens=MOST_TOKENS,
                    row_bytes=2 * hidden + 8 * top_k,
                    device=own.device,
                ),
                self._exchange,
            )
        except ExchangeError:
            raise  # SGLang's group cannot be used any more
        except (GroupError, ValueError) as error:
            return str(error)
        group.place(linear_owners(experts, own.ranks))
        self._groups[hidden, experts, top_k] = group
        logger.info(
            "experts: rank %d of %d exchanges rows of %d elements over kv-connector",
            own.rank,
            own.ranks,
            hidden,
        )
        return ""

    def _note(self, reason: str) -> None:
        """Counts a step of a layer. Each reason for SGLang's exchange is logged once."""
        if not reason:
            metrics.taken()
            return
        metrics.passed(reason)
        if reason not in self._said:
            self._said.add(reason)
            logger.info("experts: SGLang's all-gather serves some steps, for this reason: %s", reason)

    def check(self, wait: Callable[[], None]) -> None:
        """Raises GroupError with the name of the rank, if a step was void.

        ``wait()`` returns when the step has ended. It is called if there is a group.
        """
        if self._groups:
            wait()
        for group in self._groups.values():
            group.raise_fault()

    def explain(self, error: BaseException) -> BaseException:
        """Returns the error that names a lost rank, or the given error.

        The end of a rank also breaks SGLang's collectives, and their errors name no rank. Waits a moment for
        the watcher, because both see the end at the same time. The server ends in either case.
        """
        if isinstance(error, GroupError) or not self._groups:
            return error
        deadline = time.monotonic() + _NAMING_SECONDS
        while True:
            for group in self._groups.values():
                if reason := group.explanation():
                    own = self._place
                    return GroupError(f"experts: rank {own.rank} of {own.ranks}: {reason}: {error}")
            if time.monotonic() > deadline:
                return error
            time.sleep(0.01)

    def close(self) -> None:
        """Leaves the groups. Logs the error of a group that does not come to rest."""
        while self._groups:
            (hidden, _, _), group = self._groups.popitem()
            try:
                group.close()
            except (GroupError, OSError, RuntimeError) as error:
                logger.warning("experts: the group for rows of %d elements stays open: %s", hidden, error)


class LayerExchange:
    """Dispatch and combine of one layer, over the group of its shape."""

    def __init__(self, group: Any, no_expert: int, note: Callable[[str], None]) -> None:
        self._group = group
        self.rank: int = group.settings.rank
        self.ranks: int = group.settings.ranks
        self._no_expert = no_expert
        self._note = note
        self._sizes: tuple[int, ...] = ()
        self._tokens = 0
        """Rows of this rank in the dispatch whose combine is still to come, without padding."""

    def takes(self, sizes: Sequence[int], prefill: bool) -> bool:
        """Returns whether a step goes over kv-connector, and counts it. All ranks give the same arguments."""
        reason = "prefill" if prefill else "" if self._fits(sizes) else "size"
        self._note(reason)
        return not reason

    def _fits(self, sizes: Sequence[int]) -> bool:
        return bool(self._group.fits(sizes, self._group.settings.row_bytes))

    def dispatch(
        self, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, sizes: Sequence[int]
    ) -> Dispatched:
        """Sends this rank's rows and receives those of all ranks. ``sizes`` are the tokens of each rank.

        SGLang may announce more tokens than it has rows, so that all ranks have equally many. The missing
        rows have no experts.
        """
        own = sizes[self.rank]
        self._tokens, self._sizes = rows.shape[0], tuple(sizes)
        if (missing := own - self._tokens) < 0:
            raise GroupError(
                f"experts: rank {self.rank} has {self._tokens} rows, and the ranks know of {own}. "
                "Unset KV_CONNECTOR_MOE for this model."
            )
        if missing:
            rows, weights = _lengthened(rows, missing, 0), _lengthened(weights, missing, 0)
            ids = _lengthened(ids, missing, self._no_expert)
        got: Dispatched = self._group.dispatch(rows, ids, weights, sizes=sizes)
        return got

    def combine_input(self) -> torch.Tensor:
        """Returns memory for the results of all rows, from which combine() needs no copy."""
        buffer: torch.Tensor = self._group.combine_buffer(self._sizes)
        return buffer

    def combine(self, results: torch.Tensor) -> torch.Tensor:
        """Sums the results of this rank's tokens over all ranks."""
        buffer = self.combine_input()
        if results.shape != buffer.shape or results.dtype != buffer.dtype:
            raise GroupError(
                f"experts: a layer returns {tuple(results.shape)} {results.dtype} for a dispatch of "
                f"{tuple(buffer.shape)} {buffer.dtype}. Unset KV_CONNECTOR_MOE for this model."
            )
        if results.data_ptr() != buffer.data_ptr() or not results.is_contiguous():
            buffer.copy_(results)
        own = self._sizes[self.rank]
        sums = torch.empty((own, buffer.shape[1]), dtype=buffer.dtype, device=buffer.device)
        self._group.combine(sums, self._sizes)
        return sums[: self._tokens]


def _lengthened(tensor: torch.Tensor, missing: int, value: int) -> torch.Tensor:
    return torch.cat([tensor, tensor.new_full((missing, *tensor.shape[1:]), value)])


def _name(facts: SglangLayer) -> str:
    return f"layers of {facts.experts} experts with rows of {facts.hidden} elements"
