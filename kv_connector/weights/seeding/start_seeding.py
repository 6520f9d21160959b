"""Seeding: has an engine write its version to another engine, without a trainer, while both serve."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future
from concurrent.futures import wait as wait_for

from kv_connector.control.cluster_key import ClusterKey
from kv_connector.protocol.actions import Address
from kv_connector.protocol.wire.weight_version import shown
from kv_connector.weights.wire.links import Link, LinkError, Links, questions
from kv_connector.weights.wire.messages import (
    Ask,
    Seed,
    State,
    WeightMessage,
    WorkerAddress,
    Workers,
    WorkersAre,
)

logger = logging.getLogger("kv_connector")

# More than each step of a seeder may take: recording a checkpoint, writing, and applying.
SEED_S = 600.0


# Seconds between two rounds of attempts. The first is the duration of a short push. The longest bounds the
# requests of a fleet whose engines all start at once.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 5.0


class SeedError(RuntimeError):
    """The engine was not seeded. The message has the reason. ``final``: another attempt cannot succeed."""

    def __init__(self, reason: str, *, final: bool = False) -> None:
        super().__init__(reason)
        self.final = final


def seed(seeder: Address, engine: Address, links: Links, timeout: float) -> str:
    """Blocks until ``engine`` serves the version that ``seeder`` serves. Returns the version's name.

    Both addresses are those of controllers. ``timeout``: limit for all of it, in seconds. Raises SeedError.
    """
    dialled: list[Link] = []

    def dial(address: Address) -> Link:
        dialled.append(links.dial(address))
        return dialled[-1]

    try:
        if seeder == engine:
            raise SeedError(f"{seeder} cannot seed itself", final=True)
        return _seed(seeder, engine, links, timeout, dial)
    except LinkError as error:
        raise SeedError(str(error)) from None
    finally:
        for link in dialled:
            links.end(link, "it does not wait any more")


def _seed(
    seeder: Address, engine: Address, links: Links, timeout: float, dial: Callable[[Address], Link]
) -> str:
    controller = dial(seeder)
    state = links.wait(links.ask(controller, Ask()), controller, links.timeouts.connect)
    assert isinstance(state, State)
    if state.torn:
        raise SeedError(
            f"{seeder} has weights of more than one version, and stays paused: push a version to it"
        )
    if not state.served:
        if state.landing or state.landed:
            raise SeedError(
                f"{seeder} is about to serve its first version, {shown(state.landing or state.landed)}"
            )
        raise SeedError(
            f"{seeder} serves the weights that it was started with: push a version to it first", final=True
        )
    here = links.wait(links.ask(controller, Workers()), controller, links.timeouts.connect)
    assert isinstance(here, WorkersAre)
    asked: list[Future[WeightMessage]] = []
    order = Seed(uuid.uuid4().hex, state.served, WorkerAddress(engine.host, engine.port))
    for worker in here.workers:
        link = dial(Address(worker.host, worker.port))
        asked.append(links.ask(link, order))
        links.watch(link)
    # The first worker that fails decides the reason. The others are not waited for.
    done, waiting = wait_for(asked, timeout, FIRST_EXCEPTION)
    for answer in done:
        answer.result()
    if waiting:
        raise SeedError(
            f"{seeder} did not write version {shown(state.served)} to {engine} within {timeout:g} s"
        )
    return shown(state.served)


def seed_at_start(
    seeders: Sequence[Address], engine: Address, key: ClusterKey | None, *, required: bool = False
) -> None:
    """Has the first possible engine of ``seeders`` write its version to ``engine``.

    Blocks until that is done. A seeder may be unable for a moment only: a push runs, or it is starting. All
    seeders are tried again until one succeeds, for SEED_S at most. If none of them can ever succeed, the
    attempts end at once.

    If no seeder succeeded, ``required`` (the engine has no own weights) raises SeedError. An engine with
    weights keeps these.
    """
    deadline = time.monotonic() + SEED_S
    pause, problems = _FIRST_PAUSE_S, dict[Address, str]()
    with questions(key) as links:
        while True:
            final = True
            for seeder in seeders:
                try:
                    version = seed(seeder, engine, links, max(deadline - time.monotonic(), 0))
                except SeedError as error:
                    if problems.get(seeder) != str(error):
                        logger.warning("weights: %s does not seed this engine: %s", seeder, error)
                    problems[seeder] = str(error)
                    final = final and error.final
                    continue
                logger.info("weights: seeded by %s with version %s", seeder, version)
                return
            if version := _served(engine, links):
                logger.info("weights: a trainer has pushed version %s meanwhile", version)
                return
            if final or time.monotonic() + pause >= deadline:
                break
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
    reasons = "; ".join(problems.values())
    if required:
        raise SeedError(
            f"no engine of seed_from could seed this engine, which has no own weights "
            f"(--load-format dummy): {reasons}. Start this engine again when a seeder serves a pushed "
            "version, or without --load-format dummy"
        )
    logger.warning(
        "weights: no engine of seed_from could seed this engine, which keeps its weights: %s", reasons
    )


def _served(engine: Address, links: Links) -> str:
    """Returns the version that an engine serves. Empty: the weights from its start, or torn weights."""
    link = links.dial(engine)
    try:
        state = links.wait(links.ask(link, Ask()), link, links.timeouts.connect)
    except LinkError:
        return ""
    finally:
        links.end(link, "its query was answered")
    return shown(state.served) if isinstance(state, State) and not state.torn else ""
