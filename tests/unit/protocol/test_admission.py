"""The gates, and a model of two engines behind them."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from samples import sample

from kv_connector.protocol.admission import AdmissionGate, gates, may_lend
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
    lender: Engine | None = None  # has some of the prompt's blocks, which P borrows
    prefix: int = 0  # number of them
    reserved: bool = False  # D has room for it
    computed: bool = False


class Engine:
    """A pool and a queue. A request held by its gate delays no other, but a request without free blocks
    delays all behind it. ``patient``: as a lender it waits for room where it should refuse."""

    def __init__(self, prompts: AdmissionGate, loads: AdmissionGate, *, patient: bool = False) -> None:
        self.free = POOL
        self.prompts, self.loads = prompts, loads
        self.queue: list[Transfer] = []
        self.holding: list[Transfer] = []
        self.lent: list[Transfer] = []
        self.patient, self.asked = patient, list[Transfer]()

    def step(self) -> bool:
        """Frees the blocks of ended requests, then visits the queue. Returns whether anything has changed."""
        arrived, self.lent = self.lent, []
        for transfer in arrived:
            self.free += transfer.prefix
            transfer.computed = True
        asked, self.asked = self.asked, []
        for transfer in asked:
            self._hold(transfer)
        over = [t for t in self.holding if t.computed and (t.reserved or t.d is self)]
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
        return bool(over or begun or arrived or len(asked) > len(self.asked))

    def lend(self, transfer: Transfer) -> bool:
        """Holds the prefix of a prompt until the next step. Returns False if it refuses."""
        held = sum(other.prefix for other in self.lent)
        if not self.patient and not (may_lend(held, transfer.prefix, POOL) and transfer.prefix <= self.free):
            return False
        self._hold(transfer)
        return True

    def _hold(self, transfer: Transfer) -> None:
        if transfer.prefix > self.free:
            self.asked.append(transfer)
        else:
            self.free -= transfer.prefix
            self.lent.append(transfer)

    def _begin(self, transfer: Transfer) -> None:
        self.free -= transfer.blocks
        self.holding.append(transfer)
        if transfer.p is self:
            transfer.computed = transfer.lender is None or not transfer.lender.lend(transfer)
        else:
            transfer.reserved = True
            transfer.p.prompts.leave(transfer.name)

    def _gate(self, transfer: Transfer) -> AdmissionGate:
        return self.prompts if transfer.p is self else self.loads


def run(*engines: Engine) -> bool:
    """Runs the engines until nothing changes. Returns whether all requests have ended."""
    while any(engine.step() for engine in engines):
        pass
    return not any(engine.queue or engine.holding or engine.lent for engine in engines)


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


@settings(max_examples=sample(300))
@given(st.sampled_from([Role.BOTH, Role.PREFILL]), st.randoms(use_true_random=False), st.integers(1, 16))
def test_any_order_of_arrival_comes_to_its_end(role: Role, random: Random, transfers: int) -> None:
    other = Role.BOTH if role is Role.BOTH else Role.DECODE
    engines = Engine(*gates(role, POOL)), Engine(*gates(other, POOL))
    third = Engine(*gates(other, POOL))
    share = POOL // (3 if role is Role.BOTH else 2)
    halves = []
    for number in range(transfers):
        p, d = random.sample(engines, 2) if role is Role.BOTH else engines
        transfer = Transfer(str(number), p, d, random.randint(1, share))
        if random.random() < 0.5:
            transfer.lender = d if random.random() < 0.5 else third
            transfer.prefix = random.randint(1, transfer.blocks)
        halves += [(p, transfer), (d, transfer)]
    random.shuffle(halves)
    for engine, transfer in halves:
        engine.queue.append(transfer)
        random.choice(engines).step()
    assert run(*engines, third)
    assert [engine.free for engine in (*engines, third)] == [POOL, POOL, POOL]


def test_lenders_that_wait_for_room_wait_for_each_other() -> None:
    """The deadlock that a refusal prevents."""
    for patient in (True, False):
        one, two = (Engine(*gates(Role.BOTH, POOL), patient=patient) for _ in range(2))
        away = Engine(*gates(Role.DECODE, POOL))  # their D, which has room for both
        prompts = [
            Transfer(name, p, away, POOL, lender, prefix=7, reserved=True)
            for name, p, lender in (("first", one, two), ("second", two, one))
        ]
        for prompt in prompts:
            prompt.p.free -= prompt.blocks
            prompt.p.holding.append(prompt)
        for prompt in prompts:
            assert prompt.lender is not None
            prompt.computed = not prompt.lender.lend(prompt)
        assert run(one, two) is not patient
        assert [one.free, two.free] == ([0, 0] if patient else [POOL, POOL])


def test_lender_refuses_more_than_a_quarter_of_its_pool() -> None:
    assert may_lend(0, 7, POOL)
    assert may_lend(3, 4, POOL)
    assert not may_lend(0, 8, POOL)
    assert not may_lend(4, 4, POOL)


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
