"""Engines that are P and D at once do not wait for each other: vLLM's schedulers, and pretended transfers."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from vllm_stage import BLOCK, FULL, PARAMS_OF_D, PARAMS_OF_P, Stage, model, vllm_config

from kv_connector.agent.commands import FinishPrefill, ReleaseTransfer
from kv_connector.protocol.requests import DecodeRequest
from kv_connector.vllm.metadata import StepMetadata

__all__ = ["model"]

POOL = 100
SHARE = POOL // 3 - 1  # blocks, without the null block


@dataclass
class Transfer:
    p: Stage
    d: Stage
    reserved: bool = False
    told: bool = False  # P's scheduler knows of the reservation
    computed: bool = False
    finished: bool = False
    sent: bool = False


@dataclass
class Pair:
    """Two engines, each P and D for the other.

    A page arrives as soon as it is computed and requested.
    """

    engines: tuple[Stage, Stage]
    transfers: dict[str, Transfer] = field(default_factory=dict)
    loading: set[str] = field(default_factory=set)

    def add_prompt(self, name: str, p: int, tokens: int) -> None:
        self.transfers.setdefault(name, Transfer(self.engines[p], self.engines[1 - p]))
        self.engines[p].add(f"p-{name}", prompt(name, tokens), dict(PARAMS_OF_P, transfer_id=name))

    def add_load(self, name: str, p: int, tokens: int) -> None:
        self.transfers.setdefault(name, Transfer(self.engines[p], self.engines[1 - p]))
        params = dict(PARAMS_OF_D, transfer_id=name)
        self.engines[1 - p].add(f"d-{name}", prompt(name, tokens), params, max_tokens=3)

    def run(self) -> None:
        """Runs steps until all requests are over. Fails if no request makes progress any more."""
        for _ in range(1000):
            if not any(engine.scheduler.has_requests() for engine in self.engines):
                return
            for engine in self.engines:
                self._step(engine)
        left = [sorted(engine.scheduler.requests) for engine in self.engines]
        pytest.fail(f"the engines wait for each other: {left}")

    def _step(self, engine: Stage) -> None:
        output, metadata = engine.schedule()
        self._hear(metadata)
        here = {name: one for name, one in self.transfers.items() if one.p is engine}
        reserved = [name for name, one in here.items() if one.reserved and not one.told]
        sent = [name for name, one in here.items() if one.finished and one.reserved and not one.sent]
        for name in reserved:
            here[name].told = True
        for name in sent:
            here[name].sent = True
        received = [
            name
            for name in self.loading
            if self.transfers[name].d is engine and self.transfers[name].computed
        ]
        self.loading -= set(received)
        engine.update(
            output,
            reserved=reserved,
            sent=[f"p-{name}" for name in sent],
            received=[f"d-{name}" for name in received],
        )

    def _hear(self, metadata: StepMetadata) -> None:
        for command in metadata.commands:
            match command:
                case DecodeRequest():
                    self.transfers[command.transfer_id].reserved = True
                    self.loading.add(command.transfer_id)
                case FinishPrefill():
                    self.transfers[command.transfer_id].finished = True
                case ReleaseTransfer():
                    self.transfers[command.transfer_id].reserved = True
        for pages in metadata.new_pages:
            self.transfers[pages.transfer_id].computed |= pages.last


def prompt(name: str, tokens: int) -> list[int]:
    numbers = random.Random(name)
    return [numbers.randrange(300) for _ in range(tokens)]


@pytest.fixture
def pair(model: Path) -> Iterator[Pair]:
    first, second = (Stage(vllm_config(model, "kv_both", budget=4000), [FULL], POOL) for _ in range(2))
    made = Pair((first, second))
    yield made
    for engine in made.engines:
        engine.assert_idle()


Add = Callable[[str, int, int], None]


def test_loads_leave_room_for_the_prompts_that_others_load(pair: Pair) -> None:
    """Five loads of 22 blocks would fill each pool, and the prompts queue behind them."""
    for add in (pair.add_load, pair.add_prompt):
        for p in (0, 1):
            for number in range(5):
                add(f"{p}-{number}", p, 700)
    pair.run()


def test_early_prompts_leave_room_for_loads(pair: Pair) -> None:
    for add in (pair.add_prompt, pair.add_load):
        for p in (0, 1):
            for number in range(5):
                add(f"{p}-{number}", p, 700)
    pair.run()


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_arrival_comes_to_its_end(pair: Pair, seed: int) -> None:
    numbers = random.Random(seed)
    halves: list[tuple[Add, str, int, int]] = []
    for number in range(24):
        tokens = numbers.randrange(2, SHARE * BLOCK)
        adds: tuple[Add, Add] = (pair.add_prompt, pair.add_load)
        halves += [(add, f"{seed}-{number}", number % 2, tokens) for add in adds]
    numbers.shuffle(halves)
    for add, name, p, tokens in halves:
        add(name, p, tokens)
    pair.run()


def test_an_urgent_prompt_passes_an_ordinary_one_at_the_gate(model: Path) -> None:
    """With --scheduling-policy priority the order is that of vLLM's own queue.

    The share of P's pool is 20 blocks.
    """
    config = vllm_config(model, "kv_producer", budget=4000)
    config.scheduler_config.policy = "priority"
    engine = Stage(config, (FULL,), 41)

    def add(name: str, blocks: int, priority: int) -> None:
        params = dict(PARAMS_OF_P, transfer_id=name)
        engine.add(name, prompt(name, blocks * BLOCK - 1), params, priority=priority)

    def scheduled() -> list[str]:
        output, _ = engine.schedule()
        engine.update(output)
        return list(output.num_scheduled_tokens)

    add("held", 15, 5)
    assert scheduled() == ["held"]
    add("large", 10, 5)
    add("small", 2, 5)
    assert scheduled() == [], "nobody passes the first of its own priority"
    add("urgent", 2, 0)
    assert scheduled() == ["urgent"]
