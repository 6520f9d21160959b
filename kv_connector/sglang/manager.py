"""Manager: one worker's agent behind the interface of SGLang's transfer backends.

SGLang's own control plane ends at its bootstrap server, from which D learns the address of P's first worker.
That address is the agent's. The agents exchange everything else: the workers, the plan of the pages and the
ends. The socket that SGLang binds for its other backends is closed and never used.

A room is a transfer, and the request on both sides. SGLang's router draws it from 63 bits. A request that a
weight update retracts gets another room (recomputes.py). A client may choose rooms itself, and use them
again. So a transfer's id consists of the room and the number of its earlier uses. A request whose room is
still in use at D fails.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections import OrderedDict
from typing import Any
from weakref import WeakValueDictionary

import sglang

from kv_connector.agent.agent import Agent
from kv_connector.agent.start import RunningAgent, WorkerInfo, start
from kv_connector.engine.rank_placement import Device
from kv_connector.protocol.actions import Address, Reached, State
from kv_connector.protocol.requests import PrefillRequest
from kv_connector.protocol.session.fingerprint import ADVICE, engine_fingerprint
from kv_connector.protocol.wire.messages import Role
from kv_connector.protocol.wire.weight_version import shown
from kv_connector.sglang.bell import Bell
from kv_connector.sglang.internals import (
    CommonKVManager,
    DisaggregationMode,
    RankFacts,
    check_configuration,
    gather,
    loaded_checkpoint,
    model_facts,
    named,
    rank_facts,
    weight_version,
)
from kv_connector.sglang.metadata_rows import MetadataRows
from kv_connector.sglang.metrics import show_metrics
from kv_connector.sglang.polls import sending
from kv_connector.sglang.pool import PoolShape, pool_layout
from kv_connector.sglang.settings import read_settings, with_nics

logger = logging.getLogger(__name__)

_OVER = (State.DONE, State.FAILED)

# SGLang's heartbeat detects a dead server before any request was sent to it. Running transfers are ended by
# the agents' heartbeats. Seconds; SGLang accepts no less than 2.
_HEARTBEAT_S = 2.0

# Rooms whose uses are counted: 44 minutes of 100 requests a second, in about 30 MB. Older rooms count from 0
# again.
_ROOMS = 1 << 18

# Names of weight versions that are remembered: with at most 128 characters each, about 10 MB.
_NAMES = 1 << 16

# A turn of the agent takes a millisecond. A batch, for which a request would wait, takes tens of them or
# more.
_CATCH_UP_S = 0.005


class Manager(CommonKVManager):  # type: ignore[misc]  # SGLang is not typed for mypy
    """Created once in each scheduler process. Blocks until the agent listens."""

    supports_deferred_decode_kv_release = True
    reports_transfer_latency = True

    def __init__(
        self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool | None = False
    ) -> None:
        """Starts the agent. Raises errors whose messages say what to change."""
        self._running: RunningAgent | None = None
        check_configuration(args)
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        self.server_socket.close(linger=0)  # any process could write to it
        self.rows = MetadataRows(
            args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens, rank_facts(args).device
        )
        self._uses: OrderedDict[int, int] = OrderedDict()
        """Number of transfers of each room so far, by room, the oldest first."""
        self._expected = self._caught_up = 0
        """Rooms of P that the agent was given, and rooms that it has handled."""
        self._bell = Bell()
        self._running = self._start(args, server_args)
        atexit.register(self._running.close)
        self.agent: Agent = self._running.agent
        self._weights = ""
        """The last whole version that the agent was given."""
        self._torn = False
        """Whether the engine has had parts of two versions since."""
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
            """Transfers whose pages the agent may still write, by room."""
            self._kept: set[int] = set()
            """Rooms of ended requests whose pages SGLang keeps until clear_deferred_abort_state()."""
            self._requests: WeakValueDictionary[int, Any] = WeakValueDictionary()
            """The request of each room, until SGLang has cleared or dropped it."""
            self.heartbeat_interval: float = _HEARTBEAT_S
            self._start_heartbeat_checker_thread()

    @property
    def _prefills(self) -> bool:
        return bool(self.disaggregation_mode == DisaggregationMode.PREFILL)

    def _start(self, args: Any, server_args: Any) -> RunningAgent:
        model, rank = model_facts(server_args), rank_facts(args)
        role = Role.PREFILL if self._prefills else Role.DECODE
        shape = PoolShape(
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
        settings = read_settings(os.environ)
        running = start(
            with_nics(settings, rank.nics, rank.gpu, rank.workers),
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
                checkpoint=loaded_checkpoint() if settings.compare_checkpoints else None,
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

    def _show_metrics(self, running: RunningAgent, rank: RankFacts) -> None:
        if rank.metrics:
            labels = {"engine": rank.url, "dp_rank": str(rank.data_parallel_rank)}
            show_metrics(running.reporter, labels)

    # --- Called by SGLang

    def register_to_bootstrap(self) -> None:
        """Registers once the agent listens, with the agent's address instead of SGLang's socket."""
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
        if not self._prefills:
            # SGLang has dropped its requests, or is about to, and clears none of them.
            self._requests.clear()
            self._kept.clear()
            for room in list(self._landing):
                self.landed(room)
            self._waiting.clear()
            self.agent.set_waiting(())

    def note_weights(self, pushed: str = "") -> None:
        """Passes on the weight version with which SGLang's scheduler computes from its next step on.

        ``pushed``: identity of the last version that a trainer pushed to this engine. A prefill engine
        refuses pages to a decode engine of another version.
        """
        changed = (version := weight_version(pushed)) != self._weights
        if not changed and not self._torn:
            return
        # The identity of a pushed version differs with its contents.
        if changed and version in self._names and version != pushed:
            logger.warning(
                "write_imm: weight version %s was used before. Engines cannot tell its two updates apart. "
                "Give each update a new name, such as RUN-STEP.",
                version,
            )
        self._names[version] = None
        if len(self._names) > _NAMES:
            self._names.popitem(last=False)
        # The first version, also of --weight-version, is the name of the checkpoint's weights.
        self._set_weights(version, of_checkpoint=not self._weights)
        self._weights, self._torn = version, False

    def note_torn(self, pushed: str) -> None:
        """Reports that the engine stays paused, with parts of the version ``pushed``. Empty: the version is
        not known. Until the engine has a whole version, a prefill engine refuses all pages at once, and the
        error names the versions."""
        self._torn = True
        part = shown(pushed) if pushed else "another version"
        self._set_weights(named(f"parts of {part} and {shown(self._weights)}"), of_checkpoint=False)

    def _set_weights(self, version: str, *, of_checkpoint: bool) -> None:
        """Each call makes a prefill engine's agent forget the computed pages of unfinished prompts."""
        assert self._running is not None
        self._running.set_weights(version, of_checkpoint=of_checkpoint)

    def forget_checkpoint(self) -> None:
        """SGLang's scheduler computes with other weights from its next step on, which have no version."""
        assert self._running is not None
        self._running.forget_checkpoint()

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:
        """Whether nothing can land in the room's pages any more: P has reported it, or is fenced."""
        transfer = self._landing.get(bootstrap_room)
        if transfer is None:
            return True
        if self.agent.state(transfer) not in _OVER:
            return False
        self.landed(bootstrap_room)
        return True

    def clear_deferred_abort_state(self, bootstrap_room: int) -> None:
        """SGLang has freed the pages of the room's ended request."""
        self._kept.discard(bootstrap_room)
        self.landed(bootstrap_room)

    def rest(self, requests: Any) -> None:
        """SGLang's scheduler has found nothing to compute in this turn. BLOCKS until the next turn may find
        something, as Bell.wait() does.

        Does not block if other workers take their turns together with this one, because the events of their
        agents do not ring here.
        """
        if self._alone:
            self._bell.wait(requests)

    def transfer_of(self, room: int) -> str:
        """A new transfer's id. Both sides call it once for each use of the room, so their counts agree."""
        uses = self._uses[room] = self._uses.pop(room, 0) + 1
        if len(self._uses) > _ROOMS:
            self._uses.popitem(last=False)
        return str(room) if uses == 1 else f"{room}.{uses}"

    # --- P

    def expect(self, request: PrefillRequest) -> int:
        """Passes a request to the agent. Returns its number."""
        self.agent.expect(request)
        self._expected += 1
        return self._expected

    def catch_up(self, number: int) -> None:
        """BLOCKS until the agent has handled the request of this number, and so all later ones.

        SGLang puts prompts that D has requested by then into its next batch. A request that arrives a moment
        later waits until that batch is computed.
        """
        if number > self._caught_up:
            self._caught_up = self._expected
            self.agent.catch_up(_CATCH_UP_S)

    def _reached(self, reached: Reached) -> None:
        """Handles a new state on the agent's thread. SGLang queries only the first stage for bootstrapped
        rooms. The first stage reads them in the tables of all stages."""
        room = int(reached.request_id.partition(".")[0])
        if reached.side is not Role.PREFILL or room not in self.request_status:
            return
        if reached.state is State.FAILED:
            self.record_failure(room, reached.reason)
        if reached.state is not State.DONE:  # each stage learns of DONE in its own polls
            self.update_status(room, int(sending(reached.state, complete=False)))

    # --- D

    def engine_at(self, receiver: Any, bootstrap_addr: str, dp_rank: int) -> Address | None:
        """The address of the first worker of P's engine of this data-parallel rank. BLOCKS for a look-up the
        first time."""
        key = bootstrap_addr, dp_rank
        if key not in self._engines:
            row = receiver._get_bootstrap_info_from_server(dp_rank, 0, 0, 0)
            if row is None:
                return None
            self._engines[key] = Address(str(row["rank_ip"]), int(row["rank_port"]))
        return self._engines[key]

    def forget_engine(self, bootstrap_addr: str) -> None:
        """Forgets the engine's address, because another one may be there now, at other ports. The next
        request queries the bootstrap server again."""
        for key in list(self._engines):
            if key[0] == bootstrap_addr:
                self._engines.pop(key, None)
        with self.connection_lock:
            self.prefill_info_table.pop(bootstrap_addr, None)

    def _fail_prefill_recompute(self, kv_receiver: Any, reason: str) -> None:
        """Fails a request that P was to compute again, on a thread of SGLang's. P's answer may arrive after
        the transfer's end, and after an error of the agents, which has the cause."""
        if kv_receiver.conclude_state is None:
            cause = kv_receiver.failure() or (
                f"the prefill server of {kv_receiver.bootstrap_addr} did not compute the request again after "
                f"a weight update. Its log, or this one, has the cause. SGLang: {reason}"
            )
            super()._fail_prefill_recompute(kv_receiver, cause)

    def _handle_node_failure(self, failed_bootstrap_addr: str) -> None:
        """Fails the rooms of a server, on SGLang's heartbeat thread. Rooms that the agents' heartbeats watch
        are left out, because their transfers may continue while the HTTP server is silent."""
        self.addr_to_rooms_tracker[failed_bootstrap_addr].difference_update(self._landing.keys())
        super()._handle_node_failure(failed_bootstrap_addr)
        self.forget_engine(failed_bootstrap_addr)

    def wait_for(self, transfer: str, engine: Address) -> None:
        """The request has no pages yet. P keeps its prompt, and a session is opened."""
        self._waiting[transfer] = engine
        self.agent.set_waiting(self._waiting.items())

    def wait_no_more(self, transfer: str) -> None:
        """Ends wait_for(), if it was called."""
        if self._waiting.pop(transfer, None) is not None:
            self.agent.set_waiting(self._waiting.items())

    def in_use(self, room: int) -> bool:
        """Whether SGLang still has an earlier request of the room, or its pages. SGLang's tables have one
        request for each room, so an answer would be about the later one."""
        transfer = self._landing.get(room)
        landing = transfer is not None and self.agent.state(transfer) not in _OVER
        return landing or room in self._kept or room in self._requests

    def begins(self, room: int, receiver: Any) -> None:
        """The request uses the room from now on."""
        self._requests[room] = receiver

    def ends(self, room: int, receiver: Any) -> None:
        """SGLang has cleared the request. If it keeps the pages, it will clear the request again."""
        if self._requests.get(room) is receiver and room not in self._kept:
            del self._requests[room]

    def keep(self, room: int) -> None:
        """SGLang keeps the pages of the room's request, which has ended early, until nothing lands in
        them."""
        self._kept.add(room)

    def lands(self, room: int, transfer: str) -> None:
        """The agent may write to the room's pages from now on."""
        self._landing[room] = transfer

    def landed(self, room: int) -> None:
        """The agent has reported that nothing lands in the room's pages any more."""
        if (transfer := self._landing.pop(room, None)) is not None:
            self.agent.forget(transfer)
