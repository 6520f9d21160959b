"""Manager: one worker's agent, behind what SGLang's scheduler asks of a transfer backend.

SGLang's own control plane ends at its bootstrap server, which tells D where P's first worker listens: that is
our agent. All that follows, who the workers are, what goes where, how it ends, is between the agents. The
socket that SGLang binds for its other backends is closed, and nothing of theirs is ever sent.

A room is a transfer, and the request on both sides: SGLang's router draws it from 63 bits. A request that a
weight update retracts uses its room again, so a transfer's id is the room and how often it was used before.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections import OrderedDict
from typing import Any

import sglang

from kv_connector.agent.agent import Agent
from kv_connector.agent.start import Running, WorkerInfo, start
from kv_connector.engine.placement import Device
from kv_connector.protocol.actions import Address, Reached, State
from kv_connector.protocol.identity import ADVICE, engine_fingerprint
from kv_connector.protocol.messages import Role
from kv_connector.protocol.requests import PrefillRequest
from kv_connector.sglang.bell import Bell
from kv_connector.sglang.internals import (
    CommonKVManager,
    DisaggregationMode,
    RankFacts,
    check_configuration,
    gather,
    model_facts,
    rank_facts,
    weight_version,
)
from kv_connector.sglang.metadata_rows import MetadataRows
from kv_connector.sglang.metrics import show_metrics
from kv_connector.sglang.polls import sending
from kv_connector.sglang.pool import Shape, pool_layout
from kv_connector.sglang.settings import read_settings, with_nics

logger = logging.getLogger(__name__)

_OVER = (State.DONE, State.FAILED)

# SGLang's heartbeat tells of a server that is gone before anything was asked of it; what is under way our own
# heartbeats end. Seconds; SGLang takes no less than 2.
_HEARTBEAT_S = 2.0

# Rooms whose uses are counted: 44 minutes of 100 requests a second, in about 30 MB. Older rooms count from 0.
_ROOMS = 1 << 18

# Names of weight versions that are remembered: of 128 characters at most, about 10 MB.
_NAMES = 1 << 16

# A turn of the agent's takes a millisecond; a batch, for which a request would wait, tens of them and more.
_CATCH_UP_S = 0.005


class Manager(CommonKVManager):  # type: ignore[misc]  # SGLang is not typed for mypy
    """Made once in each scheduler process; blocks until the agent listens."""

    supports_deferred_decode_kv_release = True
    reports_transfer_latency = True

    def __init__(
        self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool | None = False
    ) -> None:
        """Raises with a message that says what to change."""
        self._running: Running | None = None
        check_configuration(args)
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        self.server_socket.close(linger=0)  # anybody could write there
        self.rows = MetadataRows(
            args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens, rank_facts(args).device
        )
        self._uses: OrderedDict[int, int] = OrderedDict()
        """Transfers of each room so far, by room, the oldest first."""
        self._expected = self._caught_up = 0
        """Rooms of P's that the agent was told of, and has looked at."""
        self._bell = Bell()
        self._running = self._start(args, server_args)
        atexit.register(self._running.close)
        self.agent: Agent = self._running.agent
        self._weights = ""
        """The version that the agent was given last."""
        self._names: OrderedDict[str, None] = OrderedDict()
        """Versions that the agent was given, the oldest first."""
        self.note_weights()
        self._alone = rank_facts(args).alone
        if self._alone:
            self.agent.report_reached(lambda reached: self._bell.ring())
        elif self._prefills and rank_facts(args).stage > 0:
            self.agent.report_reached(self._reached)
        if self._prefills:
            self.local_ip, self.rank_port = self._running.address.host, self._running.address.port
            self.register_to_bootstrap()
        else:
            self._engines: dict[tuple[str, int], Address] = {}
            self._waiting: dict[str, Address] = {}
            self._landing: dict[int, str] = {}
            """Transfers that the agent may still write pages of, by room."""
            self.heartbeat_interval: float = _HEARTBEAT_S
            self._start_heartbeat_checker_thread()

    @property
    def _prefills(self) -> bool:
        return bool(self.disaggregation_mode == DisaggregationMode.PREFILL)

    def _start(self, args: Any, server_args: Any) -> Running:
        model, rank = model_facts(server_args), rank_facts(args)
        role = Role.PREFILL if self._prefills else Role.DECODE
        shape = Shape(
            mla=bool(self.is_mla_backend or self.is_hybrid_mla_backend),
            kv_heads=model.kv_heads,
            first_layer=args.prefill_start_layer if self._prefills else rank.first_layer(model.layers),
            rank=rank.rank,
            ranks=rank.ranks,
            page_size=args.page_size,
            with_metadata=not self._prefills or rank.stage == rank.stages - 1,
        )
        rows = self.rows
        layout, memory = pool_layout(args, shape, (rows.address, rows.nbytes, rows.widths))
        running = start(
            with_nics(read_settings(os.environ), rank.nics, rank.gpu, rank.workers),
            WorkerInfo(
                engine_id=f"{role.value} {rank.url} dp{rank.data_parallel_rank}",
                role=role,
                rank=rank.number,
                ranks=rank.workers,
                stage=rank.stage,
                data_parallel_index=rank.data_parallel_rank,
                data_parallel_rank=rank.data_parallel_rank,
                host=rank.host,
                device=Device(rank.device, rank.gpu if rank.device != "cpu" else 0),
                compute_threads=rank.threads,
                layout=layout,
                memory=memory,
                fingerprint=engine_fingerprint(f"sglang {sglang.__version__}", model.identity, model.dtype),
                advice=ADVICE,
            ),
        )
        try:
            running.agent.set_ranks(gather(running.agent.described(running.address)))
            self._show_metrics(running, rank)
        except BaseException:
            running.close()
            raise
        logger.info(
            "write_imm: %s worker %d of %d listens at %s",
            role.value,
            rank.number,
            rank.workers,
            running.address,
        )
        return running

    def _show_metrics(self, running: Running, rank: RankFacts) -> None:
        if rank.metrics:
            labels = {"engine": rank.url, "dp_rank": str(rank.data_parallel_rank)}
            show_metrics(running.reporter, labels)

    # --- What SGLang calls

    def register_to_bootstrap(self) -> None:
        """Once the agent listens: what is registered is its address, not SGLang's own socket's."""
        if self._running is not None:
            super().register_to_bootstrap()

    def register_buffer_to_engine(self) -> None:
        """The memory is mapped again."""
        assert self._running is not None
        self._running.wake()

    def deregister_buffer_to_engine(self) -> None:
        """The memory is about to be unmapped. BLOCKS until nothing reads or writes it."""
        assert self._running is not None
        self._running.sleep()

    def note_weights(self) -> None:
        """SGLang's scheduler computes with its present weight version from its next step on. A prefill engine
        refuses pages to a decode engine of another version."""
        # A prefill engine's agent forgets the computed pages of unfinished prompts with each call.
        if (version := weight_version()) == self._weights:
            return
        if version in self._names:
            logger.warning(
                "write_imm: weight version %s was used before. Engines cannot tell its two updates apart. "
                "Give each update a new name, such as RUN-STEP.",
                version,
            )
        self._names[version] = None
        if len(self._names) > _NAMES:
            self._names.popitem(last=False)
        self._weights = version
        self.agent.set_weights(version)

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:
        """Whether nothing can land in the room's pages any more: its P has said so, or is fenced."""
        transfer = self._landing.get(bootstrap_room)
        if transfer is None:
            return True
        if self.agent.state(transfer) not in _OVER:
            return False
        self.landed(bootstrap_room)
        return True

    def clear_deferred_abort_state(self, bootstrap_room: int) -> None:
        self.landed(bootstrap_room)

    def rest(self, requests: Any) -> None:
        """SGLang's scheduler has found nothing to compute in this turn. BLOCKS until the next one may find
        something, as Bell.wait() does. Not where other workers take their turns with this one's: of what
        their agents hear it knows nothing."""
        if self._alone:
            self._bell.wait(requests)

    def transfer_of(self, room: int) -> str:
        """A new transfer's id. Both sides call it once for each use of the room, so they count alike."""
        uses = self._uses[room] = self._uses.pop(room, 0) + 1
        if len(self._uses) > _ROOMS:
            self._uses.popitem(last=False)
        return str(room) if uses == 1 else f"{room}.{uses}"

    # --- P

    def expect(self, request: PrefillRequest) -> int:
        """Returns how many it is."""
        self.agent.expect(request)
        self._expected += 1
        return self._expected

    def catch_up(self, number: int) -> None:
        """BLOCKS until the agent has looked at the request of this number, and so at those after it. What D
        has asked for by then, SGLang puts into its next batch; what it hears of a moment later waits until
        that is computed."""
        if number > self._caught_up:
            self._caught_up = self._expected
            self.agent.catch_up(_CATCH_UP_S)

    def _reached(self, reached: Reached) -> None:
        """On the agent's thread. SGLang asks the first stage alone which rooms are bootstrapped, and that one
        reads it in all stages' tables."""
        room = int(reached.request_id.partition(".")[0])
        if reached.side is not Role.PREFILL or room not in self.request_status:
            return
        if reached.state is State.FAILED:
            self.record_failure(room, reached.reason)
        if reached.state is not State.DONE:  # of which each stage hears in its own polls
            self.update_status(room, int(sending(reached.state, complete=False)))

    # --- D

    def engine_at(self, receiver: Any, bootstrap_addr: str, dp_rank: int) -> Address | None:
        """The first worker of P's engine of this data-parallel rank. BLOCKS for a look-up, the first time."""
        key = bootstrap_addr, dp_rank
        if key not in self._engines:
            row = receiver._get_bootstrap_info_from_server(dp_rank, 0, 0, 0)
            if row is None:
                return None
            self._engines[key] = Address(str(row["rank_ip"]), int(row["rank_port"]))
        return self._engines[key]

    def forget_engine(self, bootstrap_addr: str) -> None:
        """It may be another one by now, at other ports: the next request asks the bootstrap server again."""
        for key in list(self._engines):
            if key[0] == bootstrap_addr:
                self._engines.pop(key, None)
        with self.connection_lock:
            self.prefill_info_table.pop(bootstrap_addr, None)

    def _handle_node_failure(self, failed_bootstrap_addr: str) -> None:
        """On SGLang's heartbeat thread. It fails the rooms of that server, but for those that our own
        heartbeats watch over: the HTTP server may be silent and the transfer go on."""
        self.addr_to_rooms_tracker[failed_bootstrap_addr].difference_update(self._landing.keys())
        super()._handle_node_failure(failed_bootstrap_addr)
        self.forget_engine(failed_bootstrap_addr)

    def wait_for(self, transfer: str, engine: Address) -> None:
        """The request has no pages yet. Its P keeps the prompt, and a session is made."""
        self._waiting[transfer] = engine
        self.agent.set_waiting(self._waiting.items())

    def wait_no_more(self, transfer: str) -> None:
        """If it was waited for."""
        if self._waiting.pop(transfer, None) is not None:
            self.agent.set_waiting(self._waiting.items())

    def lands(self, room: int, transfer: str) -> None:
        """From now on the agent may write to the room's pages."""
        self._landing[room] = transfer

    def landed(self, room: int) -> None:
        """The agent has said that nothing lands there any more."""
        if (transfer := self._landing.pop(room, None)) is not None:
            self.agent.forget(transfer)
