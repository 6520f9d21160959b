"""The counters of a worker's agent, taken an interval at a time. Intervals are added up on their way to the
metrics.

A receiver of intervals may miss earlier ones: of several API servers, any one gets a step's interval. So
counters are sent as increments, and a rank's state is sent whole.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

import msgspec

from kv_connector.agent.agent import Agent
from kv_connector.agent.reports.ledger import AgentStats, LiveState, Timing
from kv_connector.control.membership import Activity
from kv_connector.protocol.wire.messages import Role

# Counters. The metric's name is kv_connector_<key>_total.
COUNTERS = {
    "pages_pushed": "KV pages written into decode engines",
    "bytes_pushed": "Bytes of KV pages written into decode engines",
    "layers_pushed": "Layers of prompts written into decode engines",
    "pages_pushed_before_prefill_end": "Pages that arrived before their prompt's last layer was computed",
    "bytes_pushed_before_prefill_end": "Bytes that arrived before their prompt's last layer was computed",
    "layers_pushed_before_prefill_end": "Layers that arrived before their prompt's last layer was computed",
    "pages_received": "KV pages received from prefill engines",
    "send_seconds": "Seconds from a reservation to the end of its transfer, summed over completed transfers",
    "receive_seconds": "Seconds from a reservation to its last page, summed over completed transfers",
    "pages_verified": "KV pages that were compared with those of the prefill engine (`verify_pages`)",
    "pages_corrupt": "Of these pages, those that differ. Their requests never read them",
    "transfers_unverified": "Transfers whose pages could not be verified although `verify_pages` is set",
    "malformed_messages": "Control messages rejected as malformed",
    "links_lost": "Links to peers that broke while the peer had other links, which carry its pages since",
    "links_restored": "Lost links that are up again",
    "prefix_tokens_borrowed": "Prompt tokens whose KV was loaded from the prefix caches of other engines",
    "prefix_tokens_lent": "Prompt tokens whose KV this engine held for other engines that lacked them",
    "prefix_answer_seconds": "Seconds from this engine's request for a prefix to its answer, summed",
    "prefix_load_seconds": "Seconds from a reservation to its last page, summed over borrowed prefixes",
}

# Gauges. The metric's name is kv_connector_<key>.
GAUGES = {
    "live_prefill_requests": "Prompts being computed or held for a decode engine",
    "live_decode_requests": "Requests with an open transfer to this engine",
    "live_transfers": "Native transfers open in the transfer engine",
    "live_counter_sets": "Sets of immediate counters in use",
    "remembered_transfers": "Ended transfers that are remembered for late messages: at most 65,536",
    "links_out": "Lost links of connected peers that are not up again. The other links carry their pages",
    "authenticated": "1: only peers with the cluster key may connect. 0: any peer may connect",
}

# Histograms over completed transfers, by lane. The metric's name is kv_connector_<key>.
HISTOGRAMS = {
    "send_duration_seconds": "Seconds from a reservation to the end of its writes",
    "send_first_push_seconds": "Seconds from a reservation until its first pages could be written",
    "send_size_bytes": "Bytes written for one reservation",
    "receive_duration_seconds": "Seconds from a reservation to its last page",
}

# Steps in a row that may leave their numbers to a later step.
_LATER = 16

# Phases are counted on the forward thread, at about 2 us a transfer. Up to this many transfers they are
# counted in each step,
_FEW_TRANSFERS = 16
# and with more transfers at this interval.
_COUNT_S = 1.0


class Interval(msgspec.Struct):
    """Increments of the counters, and the latest state of each rank."""

    counters: dict[str, int | float] = {}
    """{key of COUNTERS: increment}"""
    transfers: dict[str, int | float] = {}
    """{"prefill completed": increment, ...}: ended transfers, by role and outcome"""
    prefixes: dict[str, int | float] = {}
    """{"borrow lent": increment, ...}: answered requests for prefixes, by side and outcome"""
    gauges: dict[str, dict[str, int]] = {}
    """{rank: {key of GAUGES: value}}"""
    lanes: dict[str, dict[str, int]] = {}
    """{rank: {lane: peers connected over it}}"""
    phases: dict[str, dict[str, int]] = {}
    """{rank: {"decode reserved": transfers in this phase}}"""
    timings: list[tuple[str, str, float]] = []
    """(key of HISTOGRAMS, lane, value)"""

    def add(self, other: Interval) -> None:
        """Adds the interval of another rank, or a later interval of the same rank."""
        for ours, theirs in (
            (self.counters, other.counters),
            (self.transfers, other.transfers),
            (self.prefixes, other.prefixes),
        ):
            for name, increment in theirs.items():
                ours[name] = ours.get(name, 0) + increment
        self.gauges.update(other.gauges)
        self.lanes.update(other.lanes)
        self.phases.update(other.phases)
        self.timings += other.timings


class AgentReporter:
    """Takes the numbers of one agent, once per engine step."""

    def __init__(self, agent: Agent, rank: int) -> None:
        self._agent = agent
        self._rank = str(rank)
        self._counters: dict[str, int | float] = {}
        self._transfers: dict[str, int | float] = {}
        self._prefixes: dict[str, int | float] = {}
        self._shown: dict[str, dict[str, int]] = {"gauges": {}, "lanes": {}, "phases": {}}
        self._phases: dict[str, int] = {}
        self._next_count = 0.0
        self._turns: int | None = None
        self._later = 0

    def take(self, *, later: bool = False) -> Interval | None:
        """The changes since the last call, or None. ``later``: the caller waits, and another call follows.
        Returns None then, unless too many calls in a row were ``later``."""
        self._later = self._later + 1 if later else 0
        # Collecting the numbers takes 0.15 ms of the thread that launches the step (H200).
        if self._later % _LATER:
            return None
        turns = self._agent.turns
        if turns is not None and turns == self._turns:
            return None
        self._turns = turns
        # In this order, a transfer that ends in between is counted now or next time, but never shown as live
        # for good.
        live, stats = self._agent.live(), self._agent.stats()
        counters, transfers, prefixes = _counters(stats), _transfers(stats), _prefixes(stats)
        interval = Interval(
            counters=_grown(counters, self._counters),
            transfers=_grown(transfers, self._transfers),
            prefixes=_grown(prefixes, self._prefixes),
            gauges=self._changed("gauges", _gauges(live, self._agent.authenticated)),
            lanes=self._changed("lanes", _lanes(stats)),
            phases=self._changed("phases", self._count_phases(live)),
            timings=[
                (name, timing.lane, value)
                for timing in self._agent.take_timings()
                for name, value in _values(timing)
            ],
        )
        self._counters, self._transfers, self._prefixes = counters, transfers, prefixes
        return interval if any(msgspec.structs.astuple(interval)) else None

    def _changed(self, kind: str, now: dict[str, int]) -> dict[str, dict[str, int]]:
        """This rank's state, if it differs from the state that was shown. The receiver may not know the
        earlier state, so entries that are gone are sent as 0.
        """
        state = dict.fromkeys(self._shown[kind], 0) | now
        if state == self._shown[kind]:
            return {}
        self._shown[kind] = state
        return {self._rank: state}

    def _count_phases(self, live: LiveState) -> dict[str, int]:
        now = time.monotonic()
        if live.prefill_requests + live.decode_requests <= _FEW_TRANSFERS or now >= self._next_count:
            self._phases, self._next_count = self._agent.phases(), now + _COUNT_S
        return self._phases


def activity(agent: Agent) -> Activity:
    """The connector's activity for the routers. Any thread may call it."""
    live, stats = agent.live(), agent.stats()
    return Activity(
        lanes=_lanes(stats),
        transfers=live.prefill_requests + live.decode_requests,
        bytes_pushed=stats.bytes_pushed,
    )


def _lanes(stats: AgentStats) -> Counter[str]:
    """Number of connected peers, by the lane that their pages take."""
    return Counter(peer.lane for peer in stats.peers if peer.lane)


def _grown(now: dict[str, int | float], before: dict[str, int | float]) -> dict[str, int | float]:
    return {name: value - before.get(name, 0) for name, value in now.items() if value != before.get(name, 0)}


def _counters(stats: AgentStats) -> dict[str, int | float]:
    return {
        "pages_pushed": stats.pages_pushed,
        "bytes_pushed": stats.bytes_pushed,
        "layers_pushed": stats.layers_pushed,
        "pages_pushed_before_prefill_end": stats.pages_before_prefill_end,
        "bytes_pushed_before_prefill_end": stats.bytes_before_prefill_end,
        "layers_pushed_before_prefill_end": stats.layers_before_prefill_end,
        "pages_received": stats.received_pages,
        "pages_verified": stats.checks.pages,
        "pages_corrupt": stats.checks.corrupt,
        "transfers_unverified": stats.checks.unverified,
        "send_seconds": stats.sent_seconds,
        "receive_seconds": stats.received_seconds,
        "malformed_messages": stats.malformed_messages,
        "links_lost": stats.links_lost,
        "links_restored": stats.links_restored,
        "prefix_tokens_borrowed": stats.prefixes.tokens_borrowed,
        "prefix_tokens_lent": stats.prefixes.tokens_lent,
        "prefix_answer_seconds": stats.prefixes.answer_seconds,
        "prefix_load_seconds": stats.prefixes.load_seconds,
    }


def _transfers(stats: AgentStats) -> dict[str, int | float]:
    return {
        f"{role} {outcome.value}": count
        for role, outcomes in (("prefill", stats.sent), ("decode", stats.received))
        for outcome, count in outcomes.items()
    }


def _prefixes(stats: AgentStats) -> dict[str, int | float]:
    return {
        f"{side} {outcome.value}": count
        for side, outcomes in (("borrow", stats.prefixes.borrow), ("lend", stats.prefixes.lend))
        for outcome, count in outcomes.items()
    }


def _values(timing: Timing) -> Iterator[tuple[str, float]]:
    """The values of a transfer, by key of HISTOGRAMS."""
    if timing.side is Role.DECODE:
        yield "receive_duration_seconds", timing.seconds
        return
    yield "send_duration_seconds", timing.seconds
    yield "send_first_push_seconds", timing.first_push_seconds
    yield "send_size_bytes", timing.nbytes


def _gauges(live: LiveState, authenticated: bool) -> dict[str, int]:
    return {
        "live_prefill_requests": live.prefill_requests,
        "live_decode_requests": live.decode_requests,
        "live_transfers": live.engine_transfers,
        "live_counter_sets": live.counter_sets,
        "remembered_transfers": live.remembered,
        "links_out": live.links_out,
        "authenticated": int(authenticated),
    }
