"""A rank of `kv-connector bench moe`: our dispatch and combine beside torch's collectives."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kv_connector.bench.moe import OURS, ExchangeShape, ExpertsWorkload, MeasuredExchange
from kv_connector.moe import oracle
from kv_connector.moe.group import Group, GroupSettings

# Pairs of dispatch and combine in a CUDA graph: replaying it costs the CPU microseconds, as one pair does.
_PAIRS = 20
# Routings used in turn, so that no pair finds its rows in the caches of the previous pair.
_ROUTINGS = 4
_WARM_UPS = 10
# Elements per scale of fp8 rows, as in DeepSeek-V3.
_SCALED = 128


def run_rank(
    pipe: Connection, rank: int, workload: ExpertsWorkload, backend: str, store: str, gpu: bool
) -> None:
    """Sends each MeasuredExchange from rank 0 to the coordinator, and None at the end. Errors go as text."""
    try:
        bench = _Rank(rank, workload, backend, store, gpu)
        for measured in bench.run():
            if rank == 0:
                pipe.send(measured)
        pipe.send(None)
    except Exception as error:
        pipe.send(f"rank {rank}: {type(error).__name__}: {error}")


@dataclass(frozen=True)
class _DispatchCombine:
    """One contestant's dispatch and combine of a routing, by the routing's number."""

    call: Callable[[int], None]
    result: Callable[[int], torch.Tensor]
    """Returns the combined rows of this rank, after call() of the same number."""


class _Rank:
    def __init__(self, rank: int, workload: ExpertsWorkload, backend: str, store: str, gpu: bool) -> None:
        self._rank, self._workload, self._backend, self._gpu = rank, workload, backend, gpu
        self._ranks = workload.ranks
        self._device = torch.device("cuda", rank) if gpu else torch.device("cpu")
        # torch 2.13 has new names for two collectives. vLLM's releases need older torch.
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        if gpu:
            torch.cuda.set_device(rank)
        else:
            torch.set_num_threads(1)
        file = dist.FileStore(store, self._ranks)
        both = "cpu:gloo,cuda:nccl" if gpu else "gloo"
        dist.init_process_group(both, store=file, rank=rank, world_size=self._ranks)
        self._on_cpu: Any = dist.new_group(backend="gloo")
        self._owners = [expert * self._ranks // workload.experts for expert in range(workload.experts)]

    def run(self) -> Iterator[MeasuredExchange]:
        try:
            for shape in self._workload.shapes:
                yield from self._shape(shape)
        finally:
            dist.destroy_process_group()

    def _shape(self, shape: ExchangeShape) -> Iterator[MeasuredExchange]:
        inputs = [
            [self._inputs(shape, rank, number) for rank in range(self._ranks)] for number in range(_ROUTINGS)
        ]
        settings = GroupSettings(
            rank=self._rank,
            ranks=self._ranks,
            hidden=shape.hidden,
            top_k=self._workload.top_k,
            experts=self._workload.experts,
            max_tokens=shape.tokens,
            row_bytes=2 * shape.hidden + 16 * self._workload.top_k,
            device=self._rank if self._gpu else None,
        )
        group = Group.form(settings, self._gather)
        try:
            group.place(self._owners)
            results = self._results(shape)
            ours = self._ours(group, shape, inputs, results)
            theirs = self._theirs(shape, inputs, results)
            for number in range(_ROUTINGS):
                self._verify(number, ours, theirs, inputs[number], results)
            # Both contestants take turns, twice, so that neither has the better half of the time for itself.
            for name, pair in ((self._backend, theirs), (OURS, ours)) * 2:
                yield MeasuredExchange(shape, name, self._times(pair))
            self._settle()
            group.raise_fault()
        finally:
            group.close()

    def _inputs(self, shape: ExchangeShape, rank: int, number: int) -> oracle.Tokens:
        """Makes a rank's tokens, which every rank can reproduce."""
        draw = torch.Generator().manual_seed(1000 * rank + number)
        count = self._workload.experts
        ids = torch.rand((shape.tokens, count), generator=draw).topk(self._workload.top_k, dim=1).indices
        x = torch.randn((shape.tokens, shape.hidden), generator=draw).clamp(-4, 4)
        rows = x.to(torch.float8_e4m3fn).to(self._device)
        scales = torch.rand((shape.tokens, -(-shape.hidden // _SCALED)), generator=draw).to(self._device)
        weights = torch.rand((shape.tokens, self._workload.top_k), generator=draw).to(self._device)
        return oracle.Tokens(rows, ids.to(torch.int32).to(self._device), weights, (scales,))

    def _results(self, shape: ExchangeShape) -> list[torch.Tensor]:
        """Makes random results of each rank's experts for all rows."""
        made = []
        for rank in range(self._ranks):
            draw = torch.Generator().manual_seed(77 + rank)
            rows = torch.randn((self._ranks * shape.tokens, shape.hidden), generator=draw)
            made.append(rows.to(torch.bfloat16).to(self._device))
        return made

    def _ours(
        self,
        group: Group,
        shape: ExchangeShape,
        inputs: list[list[oracle.Tokens]],
        results: list[torch.Tensor],
    ) -> _DispatchCombine:
        sizes = (shape.tokens,) * self._ranks
        buffer = group.combine_buffer(sizes)
        buffer.copy_(results[self._rank])
        out = torch.empty((shape.tokens, shape.hidden), dtype=torch.bfloat16, device=self._device)

        def call(number: int) -> None:
            own = inputs[number][self._rank]
            group.dispatch(own.x, own.ids, own.weights, scales=own.scales, sizes=sizes)
            group.combine(out, sizes)

        return _DispatchCombine(call, lambda _: out)

    def _theirs(
        self, shape: ExchangeShape, inputs: list[list[oracle.Tokens]], results: list[torch.Tensor]
    ) -> _DispatchCombine:
        """Sends all rows to all ranks, and sums over all ranks.

        Rows without an expert on a rank count as zero.
        """
        sent = []
        for routing in inputs:
            own = routing[self._rank]
            sent.append([own.x.view(torch.uint8), *own.scales, own.ids, own.weights])
        received = [
            torch.empty((self._ranks * one.shape[0], *one.shape[1:]), dtype=one.dtype, device=self._device)
            for one in sent[0]
        ]
        parts = []
        for routing in inputs:
            part = results[self._rank].clone()
            part[~oracle.wanted(torch.cat([one.ids for one in routing]), self._owners, self._rank)] = 0
            parts.append(part)
        out = torch.empty((shape.tokens, shape.hidden), dtype=torch.bfloat16, device=self._device)

        def gather(number: int) -> None:
            for target, source in zip(received, sent[number], strict=True):
                dist.all_gather_into_tensor(target, source)

        def call(number: int) -> None:
            if self._gpu:
                with dist._coalescing_manager(device=self._device):  # one launch, as vLLM's group call
                    gather(number)
            else:
                gather(number)
            dist.reduce_scatter_tensor(out, parts[number])

        return _DispatchCombine(call, lambda _: out)

    def _verify(
        self,
        number: int,
        ours: _DispatchCombine,
        theirs: _DispatchCombine,
        routing: list[oracle.Tokens],
        results: list[torch.Tensor],
    ) -> None:
        expected = oracle.combine(results, [one.ids for one in routing], self._owners, self._rank)
        ours.call(number)
        self._settle()
        if not torch.equal(ours.result(number), expected):
            raise ValueError("our sums differ from the oracle's")
        theirs.call(number)
        self._settle()
        # The tolerance allows for rounding: the additions have another order.
        if not torch.allclose(theirs.result(number).float(), expected.float(), atol=0.1, rtol=0.02):
            raise ValueError(f"the sums of {self._backend} differ from the oracle's")

    def _times(self, pair: _DispatchCombine) -> list[float]:
        """Returns the microseconds of a pair by repetition, as the slowest rank measured them."""
        own = self._replayed(pair) if self._gpu else self._called(pair)
        everyones: list[Any] = [None] * self._ranks
        dist.all_gather_object(everyones, own, group=self._on_cpu)
        return [max(times) for times in zip(*everyones, strict=True)]

    def _called(self, pair: _DispatchCombine) -> list[float]:
        times = []
        for number in range(_WARM_UPS + self._workload.iterations):
            begin = time.perf_counter()
            pair.call(number % _ROUTINGS)
            times.append((time.perf_counter() - begin) * 1e6)
        return times[_WARM_UPS:]

    def _replayed(self, pair: _DispatchCombine) -> list[float]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for number in range(_ROUTINGS):
                pair.call(number)
        self._settle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for number in range(_PAIRS):
                pair.call(number % _ROUTINGS)
        self._settle()
        times = []
        for _ in range(_WARM_UPS + self._workload.iterations):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / _PAIRS * 1e3)
        self._settle()
        return times[_WARM_UPS:]

    def _settle(self) -> None:
        """Waits until the GPUs of all ranks are idle."""
        if self._gpu:
            torch.cuda.synchronize()
        self._gather(b"")

    def _gather(self, message: bytes) -> list[bytes]:
        messages: list[Any] = [None] * self._ranks
        dist.all_gather_object(messages, message, group=self._on_cpu)
        return messages


def store_in(directory: Path) -> str:
    """Returns the file over which the ranks of a run find each other."""
    return str(directory / "ranks")
