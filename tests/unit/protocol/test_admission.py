"""The gates, and a model of two engines behind them."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from samples import sample

from kv_connector.protocol.admission import AdmissionGate, DeferralGate, gates, may_lend
from kv_connector.protocol.wire.messages import Role

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


def test_no_later_request_passes_the_first_in_the_queue() -> None:
    gate = AdmissionGate(10)
    gate.enter("a", 4)
    assert gate.must_wait("large", 7)
    assert gate.must_wait("small", 1)
    gate.leave("a")
    assert gate.must_wait("small", 1)
    assert not gate.must_wait("large", 7)
    gate.enter("large", 7)
    assert not gate.must_wait("small", 1)


def test_request_that_leaves_the_queue_holds_up_no_other() -> None:
    gate = AdmissionGate(10)
    gate.enter("a", 4)
    assert gate.must_wait("large", 7)
    gate.leave("large")
    assert not gate.must_wait("small", 1)


def test_request_larger_than_the_quota_goes_alone() -> None:
    gate = AdmissionGate(10)
    assert not gate.must_wait("huge", 30)
    gate.enter("huge", 30)
    assert gate.must_wait("small", 1)


def test_loads_whose_prompts_wait_leave_as_many_blocks_free() -> None:
    free = POOL
    _, loads = gates(Role.DECODE, POOL, lambda: free)
    assert not loads.must_wait("a", 10)
    loads.enter("a", 10)
    free -= 10
    assert not loads.must_wait("b", 5)
    loads.enter("b", 5)
    free -= 5
    assert loads.must_wait("c", 1), "these loads then hold more than stays free"
    free += 1  # another request ends
    assert loads.must_wait("c", 1), "its own block does not stay free"
    free += 1
    assert not loads.must_wait("c", 1)


def test_load_without_room_does_not_stop_the_requests_behind_it() -> None:
    free = POOL
    gate = DeferralGate(lambda: free)
    assert not gate.must_wait("alone", POOL)
    free = 10
    assert gate.must_wait("large", 11)
    assert gate.defers
    gate.leave("large")  # P has reported that the prompt is next
    assert gate.first() is None


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
    due: bool = False  # P has reported that it is next
    computed: bool = False


class Engine:
    """A pool and a queue. A request held by its gate delays no other, but a request without free blocks
    delays all behind it. ``patient``: as a lender it waits for room where it should refuse."""

    def __init__(self, role: Role | None, *, patient: bool = False, notices: bool = True) -> None:
        """``role`` None: there are no gates. ``notices``: as P it reports the prompts that are next."""
        self.free = POOL
        self.prompts, self.loads = AdmissionGate(None), AdmissionGate(None)
        if role is not None:
            self.prompts, self.loads = gates(role, POOL, lambda: self.free)
        self.notices = notices
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
            passes = transfer.due and self.loads.defers if transfer.d is self else transfer.reserved
            gated = not passes
            if gated and self._gate(transfer).must_wait(transfer.name, transfer.blocks):
                continue
            if transfer.blocks > self.free:
                break
            if gated:
                self._gate(transfer).enter(transfer.name, transfer.blocks)
            self._begin(transfer)
            begun.append(transfer)
        self.queue = [transfer for transfer in self.queue if transfer not in begun]
        noticed = self.notices and self._notice()
        return bool(over or begun or arrived or noticed or len(asked) > len(self.asked))

    def _notice(self) -> bool:
        """Reports the prompt behind those that have been reported and wait for no D."""
        prompts = [transfer for transfer in self.queue if transfer.p is self]
        later = [transfer for transfer in prompts if not transfer.due]
        if not later or (self.prompts.first() is None and len(later) < len(prompts)):
            return False
        self._report(later[0])
        return True

    def _report(self, transfer: Transfer) -> None:
        if self.notices and not transfer.due:
            transfer.due = True
            if transfer.d.loads.defers and transfer in transfer.d.queue:
                transfer.d.loads.leave(transfer.name)

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
            self._report(transfer)
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
    engines = [Engine(None) for _ in range(2)]
    for p, d in (engines, engines[::-1]):
        transfer = Transfer(f"to {engines.index(d)}", p, d, POOL)
        d.queue.append(transfer)
        p.queue.append(transfer)
    for engine in engines:
        engine.queue.sort(key=lambda transfer: transfer.p is engine)
    assert not run(*engines)
    assert [engine.free for engine in engines] == [0, 0]


def test_loads_come_to_their_end_without_reports() -> None:
    """They then enter as if D had room for half as many."""
    p, d = Engine(Role.PREFILL, notices=False), Engine(Role.DECODE)
    d.free = 10  # running requests have the other blocks
    transfers = [Transfer(str(number), p, d, blocks) for number, blocks in enumerate((6, 3, 10, 3))]
    p.queue, d.queue = list(transfers), list(transfers)
    assert run(p, d)
    assert d.free == 10


@settings(max_examples=sample(300))
@given(st.sampled_from([Role.BOTH, Role.PREFILL]), st.randoms(use_true_random=False), st.integers(1, 16))
def test_any_order_of_arrival_comes_to_its_end(role: Role, random: Random, transfers: int) -> None:
    other = Role.BOTH if role is Role.BOTH else Role.DECODE
    engines = Engine(role), Engine(other)
    third = Engine(other)
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
        one, two = (Engine(Role.BOTH, patient=patient) for _ in range(2))
        away = Engine(Role.DECODE)  # their D, which has room for both
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


def test_gate_lets_an_earlier_place_pass_the_first_in_the_queue() -> None:
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


def test_gate_forgets_requests_that_have_left() -> None:
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
