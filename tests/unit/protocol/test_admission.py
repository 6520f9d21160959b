"""The gates, and a model of two engines behind them."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from samples import sample

from kv_connector.protocol.admission import AdmissionGate, gates
from kv_connector.protocol.messages import Role

POOL = 30


def test_a_gate_lets_in_what_fits_its_share() -> None:
    gate = AdmissionGate(10)
    assert not gate.must_wait("a", 4)
    gate.enter("a", 4)
    assert not gate.must_wait("b", 6)
    gate.enter("b", 6)
    assert gate.must_wait("c", 1)
    gate.leave("a")
    assert not gate.must_wait("c", 4)


def test_nobody_passes_who_waits_first() -> None:
    gate = AdmissionGate(10)
    gate.enter("a", 4)
    assert gate.must_wait("large", 7)
    assert gate.must_wait("small", 1)
    gate.leave("a")
    assert gate.must_wait("small", 1)
    assert not gate.must_wait("large", 7)
    gate.enter("large", 7)
    assert not gate.must_wait("small", 1)


def test_who_leaves_the_queue_holds_up_nobody() -> None:
    gate = AdmissionGate(10)
    gate.enter("a", 4)
    assert gate.must_wait("large", 7)
    gate.leave("large")
    assert not gate.must_wait("small", 1)


def test_what_is_larger_than_the_share_goes_alone() -> None:
    gate = AdmissionGate(10)
    assert not gate.must_wait("huge", 30)
    gate.enter("huge", 30)
    assert gate.must_wait("small", 1)


def test_loads_of_an_engine_that_is_d_only_fill_its_pool() -> None:
    _, loads = gates(Role.DECODE, POOL)
    loads.enter("a", POOL)
    assert not loads.must_wait("b", POOL)


@dataclass(eq=False)
class Transfer:
    """A prompt at P and its load at D, with this number of blocks each."""

    name: str
    p: Engine
    d: Engine
    blocks: int
    reserved: bool = False  # D has room for it
    computed: bool = False


class Engine:
    """A pool and a queue. A request held by its gate delays no other, but a request without free blocks
    delays all behind it."""

    def __init__(self, prompts: AdmissionGate, loads: AdmissionGate) -> None:
        self.free = POOL
        self.prompts, self.loads = prompts, loads
        self.queue: list[Transfer] = []
        self.holding: list[Transfer] = []

    def step(self) -> bool:
        """Frees the blocks of ended requests, then visits the queue. Returns whether anything has changed."""
        over = [t for t in self.holding if (t.reserved if t.p is self else t.computed)]
        for transfer in over:
            self.holding.remove(transfer)
            self._gate(transfer).leave(transfer.name)
            self.free += transfer.blocks
        begun = []
        for transfer in self.queue:
            # A prompt that D has room for is treated like a request without a transfer: it needs no gate,
            # only free blocks.
            gated = transfer.d is self or not transfer.reserved
            if gated and self._gate(transfer).must_wait(transfer.name, transfer.blocks):
                continue
            if transfer.blocks > self.free:
                break
            if gated:
                self._gate(transfer).enter(transfer.name, transfer.blocks)
            self._begin(transfer)
            begun.append(transfer)
        self.queue = [transfer for transfer in self.queue if transfer not in begun]
        return bool(over or begun)

    def _begin(self, transfer: Transfer) -> None:
        self.free -= transfer.blocks
        self.holding.append(transfer)
        if transfer.p is self:
            transfer.computed = True
        else:
            transfer.reserved = True
            transfer.p.prompts.leave(transfer.name)

    def _gate(self, transfer: Transfer) -> AdmissionGate:
        return self.prompts if transfer.p is self else self.loads


def run(*engines: Engine) -> bool:
    """Runs the engines until nothing changes. Returns whether all requests have ended."""
    while any(engine.step() for engine in engines):
        pass
    return not any(engine.queue or engine.holding for engine in engines)


def test_engines_that_fill_their_pools_with_loads_wait_for_each_other() -> None:
    """The deadlock that the gates prevent."""
    engines = [Engine(AdmissionGate(None), AdmissionGate(None)) for _ in range(2)]
    for p, d in (engines, engines[::-1]):
        transfer = Transfer(f"to {engines.index(d)}", p, d, POOL)
        d.queue.append(transfer)
        p.queue.append(transfer)
    for engine in engines:
        engine.queue.sort(key=lambda transfer: transfer.p is engine)
    assert not run(*engines)
    assert [engine.free for engine in engines] == [0, 0]


@settings(deadline=None, max_examples=sample(300))
@given(st.sampled_from([Role.BOTH, Role.PREFILL]), st.randoms(use_true_random=False), st.integers(1, 16))
def test_any_order_of_arrival_comes_to_its_end(role: Role, random: Random, transfers: int) -> None:
    other = Role.BOTH if role is Role.BOTH else Role.DECODE
    engines = Engine(*gates(role, POOL)), Engine(*gates(other, POOL))
    share = POOL // (3 if role is Role.BOTH else 2)
    halves = []
    for number in range(transfers):
        p, d = random.sample(engines, 2) if role is Role.BOTH else engines
        transfer = Transfer(str(number), p, d, random.randint(1, share))
        halves += [(p, transfer), (d, transfer)]
    random.shuffle(halves)
    for engine, transfer in halves:
        engine.queue.append(transfer)
        random.choice(engines).step()
    assert run(*engines)
    assert [engine.free for engine in engines] == [POOL, POOL]


def test_gate_lets_an_earlier_place_pass_who_waits_first() -> None:
    gate = AdmissionGate(10)
    gate.enter("a", 5)
    assert gate.must_wait("large", 7, (5, 1.0))
    assert gate.must_wait("later", 1, (5, 2.0))
    assert not gate.must_wait("urgent", 1, (0, 3.0))
    gate.enter("urgent", 1)
    # An urgent request that finds no room is the first one from then on.
    assert gate.must_wait("large and urgent", 8, (0, 4.0))
    assert gate.first() == "large and urgent"
    gate.leave("a")
    assert gate.must_wait("large", 7, (5, 1.0))
    assert not gate.must_wait("large and urgent", 8, (0, 4.0))


def test_gate_forgets_who_has_left() -> None:
    gate = AdmissionGate(10)
    gate.enter("a", 10)
    assert gate.must_wait("first", 1)
    for number in range(10_000):
        assert gate.must_wait(str(number), 1)
        gate.leave(str(number))
    assert gate.first() == "first"
    assert len(gate._order) < 100
    gate.leave("a")
    assert not gate.must_wait("first", 1)
