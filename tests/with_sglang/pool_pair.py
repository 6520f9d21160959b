"""Two halves of a request without servers: a P's and a D's manager in this process, over real agents and
SGLang's own bootstrap server. The tests make the calls of a scheduler."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from kv_connector.lab.free_ports import free_ports
from kv_connector.sglang import manager as manager_module
from kv_connector.sglang import plugin
from kv_connector.sglang.internals import (
    CommonKVBootstrapServer,
    DisaggregationMode,
    KVArgs,
    KVPoll,
    ModelFacts,
)
from kv_connector.sglang.manager import Manager
from kv_connector.sglang.receiver import Receiver
from kv_connector.sglang.sender import Sender

HOST = "127.0.0.1"
PATIENCE = 30.0
PAGE_SIZE, PAGES, LAYERS, HEADS, HEAD_BYTES, SLOTS = 4, 32, 3, 2, 16, 8
# Widths of SGLang's metadata buffers. The last one has the room's number.
WIDTHS = (64, 64, 512, 64)


@dataclass
class Half:
    """A server's half: its pools, and the manager over them."""

    manager: Any
    pages: npt.NDArray[np.uint8]  # [K and V of each layer, page, bytes]
    metadata: list[npt.NDArray[np.uint8]]  # [slot, width] of each buffer
    states: list[npt.NDArray[np.uint8]] = field(default_factory=list)  # [row, bytes] of each kind

    def fill_slot(self, slot: int, room: int) -> None:
        """Fills a metadata slot, as SGLang's MetadataBuffers.set_buf() does."""
        for number, buffer in enumerate(self.metadata):
            buffer[slot] = (room + number) % 251
        self.metadata[-1][slot, :8] = np.frombuffer(room.to_bytes(8, "little"), np.uint8)

    def slot_room(self, slot: int) -> int:
        return int.from_bytes(self.metadata[-1][slot, :8].tobytes(), "little")


def until(condition: Callable[[], object], what: str = "") -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE} s for {what or condition}"
        time.sleep(0.002)


def kv_args(half: Half, state_kinds: Sequence[str] = ()) -> Any:
    args = KVArgs()
    args.engine_rank = args.pp_rank = args.gpu_id = args.prefill_start_layer = 0
    args.system_dp_rank, args.ib_device, args.page_size = 0, None, PAGE_SIZE
    args.kv_data_ptrs = [plane.ctypes.data for plane in half.pages]
    args.kv_data_lens = [plane.nbytes for plane in half.pages]
    args.kv_item_lens = [plane[0].nbytes for plane in half.pages]
    args.kv_layer_ids, args.num_draft_entries, args.kv_cache_dtype_str = [], 0, "auto"
    args.kv_layout = args.mla_compression_ratios = args.swa_kv_cache_layout = None
    args.aux_data_ptrs = [buffer.ctypes.data for buffer in half.metadata]
    args.aux_data_lens = [buffer.nbytes for buffer in half.metadata]
    args.aux_item_lens = [buffer[0].nbytes for buffer in half.metadata]
    args.state_types = [SimpleNamespace(value=kind) for kind in state_kinds]
    args.state_data_ptrs = [[rows.ctypes.data] for rows in half.states]
    args.state_data_lens = [[rows.nbytes] for rows in half.states]
    args.state_item_lens = [[rows[0].nbytes] for rows in half.states]
    args.state_layer_ids = args.state_dim_per_tensor = [[] for _ in state_kinds]
    args.state_slice_outer_counts = args.state_conv_shard_groups = [[] for _ in state_kinds]
    args.is_hybrid_mla_backend = False
    return args


class Pair:
    """P and D, and the rooms that are opened between them."""

    def __init__(self, stack: ExitStack, state_kinds: Sequence[str]) -> None:
        from sglang.srt.runtime_context import get_context, get_parallel

        plugin.register()
        self.port = free_ports(1)[0]
        self._stack = stack
        override = get_context().override_server_args(
            host=HOST,
            disaggregation_bootstrap_port=self.port,
            disaggregation_transfer_backend=plugin.BACKEND,
            device="cpu",
        )
        self._server_args = stack.enter_context(override)
        ranks = dict.fromkeys(("attn_tp_rank", "attn_cp_rank", "attn_dp_rank", "attn_dcp_rank"), 0)
        stack.enter_context(get_parallel().override(**ranks, pp_group=None))
        facts = ModelFacts("Llama 00", "float32", HEADS, LAYERS)
        original, manager_module.model_facts = manager_module.model_facts, lambda server_args: facts
        stack.callback(setattr, manager_module, "model_facts", original)
        bootstrap = CommonKVBootstrapServer(HOST, self.port)
        stack.callback(bootstrap.close)
        self.kinds = tuple(state_kinds)
        self.prefill = self.half(DisaggregationMode.PREFILL, 1)
        self.decode = self.half(DisaggregationMode.DECODE, 2)

    @property
    def bootstrap_addr(self) -> str:
        return f"{HOST}:{self.port}"

    def half(self, mode: Any, seed: int) -> Half:
        rng = np.random.default_rng(seed)

        def random(*shape: int) -> npt.NDArray[np.uint8]:
            return rng.integers(1, 255, shape, np.uint8)

        half = Half(
            None,
            random(2 * LAYERS, PAGES, PAGE_SIZE * HEADS * HEAD_BYTES),
            [np.zeros((SLOTS, width), np.uint8) for width in WIDTHS],
            [random(SLOTS, 48) for _ in self.kinds],
        )
        half.manager = Manager(kv_args(half, self.kinds), mode, self._server_args)
        self._stack.callback(half.manager._running.close)
        return half

    def restart_prefill(self) -> None:
        """Ends P, and starts another one behind the same bootstrap server. D has noticed it."""
        self.prefill.manager._running.close()
        self.prefill = self.half(DisaggregationMode.PREFILL, 1)
        self.decode.manager.forget_engine(self.bootstrap_addr)

    def send_room(self, room: int) -> Sender:
        return Sender(self.prefill.manager, self.bootstrap_addr, room)

    def receive_room(self, room: int) -> Receiver:
        """Opens D's half, as far as SGLang's DecodePreallocQueue does before it has pages."""
        receiver = Receiver(self.decode.manager, self.bootstrap_addr, room)
        assert self.decode.manager.try_ensure_parallel_info(self.bootstrap_addr)
        receiver.init(0)
        return receiver

    def bootstrapped(
        self, room: int, target: Sequence[int], slot: int = 5, prefix: int = 0
    ) -> tuple[Sender, Receiver]:
        """Opens both halves, and has D request its pages."""
        sender, receiver = self.send_room(room), self.receive_room(room)
        assert sender.poll() == KVPoll.Bootstrapping
        assert receiver.poll() == KVPoll.WaitingForInput
        receiver.send_metadata(pages(target), slot, [[3]] * len(self.kinds), decode_prefix_len=prefix)
        until(lambda: sender.poll() == KVPoll.WaitingForInput, "RESERVE")
        assert sender.pop_decode_prefix_len() == prefix
        return sender, receiver

    def holds(self, source: Sequence[int], target: Sequence[int]) -> bool:
        """Returns whether P's pages have arrived, in every layer."""
        return bool((self.prefill.pages[:, list(source)] == self.decode.pages[:, list(target)]).all())

    def idle(self) -> None:
        """Waits until neither agent has a transfer in flight or keeps a state."""
        for half in (self.prefill, self.decode):
            agent = half.manager.agent
            until(lambda agent=agent: agent.live().idle, "an idle agent")  # type: ignore[misc]  # mypy infers no lambda with a default
            until(lambda agent=agent: agent._ledger.states == 0, "a state that is kept")  # type: ignore[misc]  # mypy infers no lambda with a default
            reports = agent.take_reports()
            assert not reports.finished_sending | reports.finished_recving
            assert not half.manager.request_status
        assert not self.decode.manager._landing.keys() | self.decode.manager._waiting.keys()


def pages(numbers: Sequence[int]) -> npt.NDArray[np.int32]:
    return np.array(numbers, np.int32)


@contextmanager
def pair(state_kinds: Sequence[str] = ()) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack, state_kinds)
