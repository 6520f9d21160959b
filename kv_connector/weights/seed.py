"""Has an engine write the version that it serves to another one: without a trainer, while both serve."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future
from concurrent.futures import wait as wait_for

from kv_connector.control.cluster_key import ClusterKey
from kv_connector.protocol.actions import Address
from kv_connector.weights.links import Link, LinkError, Links, questions
from kv_connector.weights.messages import (
    Ask,
    Seed,
    State,
    WeightMessage,
    WorkerAddress,
    Workers,
    WorkersAre,
)

logger = logging.getLogger("kv_connector")

# More than each step of a seeder's may take by itself: to look at a checkpoint, to write, to be applied.
SEED_S = 600.0


class SeedError(RuntimeError):
    """The engine goes on with what it has; the message says why."""


def seed(seeder: Address, engine: Address, links: Links, timeout: float) -> str:
    """Blocks until ``engine`` serves the version that ``seeder`` serves, which it returns. Both are
    controllers. ``timeout``: seconds, for all of it. Raises SeedError."""
    dialled: list[Link] = []

    def dial(address: Address) -> Link:
        dialled.append(links.dial(address))
        return dialled[-1]

    try:
        if seeder == engine:
            raise SeedError(f"{seeder} cannot seed itself")
        return _seed(seeder, engine, links, timeout, dial)
    except LinkError as error:
        raise SeedError(str(error)) from None
    finally:
        for link in dialled:
            links.end(link, "who asked for it does not wait any more")


def _seed(
    seeder: Address, engine: Address, links: Links, timeout: float, dial: Callable[[Address], Link]
) -> str:
    controller = dial(seeder)
    state = links.wait(links.ask(controller, Ask()), controller, links.timeouts.connect)
    assert isinstance(state, State)
    if state.torn:
        raise SeedError(f"{seeder} has weights of more than one version, and stays paused: push it one")
    if not state.served:
        raise SeedError(f"{seeder} serves what it was started with: push it a version first")
    here = links.wait(links.ask(controller, Workers()), controller, links.timeouts.connect)
    assert isinstance(here, WorkersAre)
    asked: list[Future[WeightMessage]] = []
    order = Seed(uuid.uuid4().hex, state.served, WorkerAddress(engine.host, engine.port))
    for worker in here.workers:
        link = dial(Address(worker.host, worker.port))
        asked.append(links.ask(link, order))
        links.watch(link)
    # The first that cannot is the reason, and the others are not waited for.
    done, waiting = wait_for(asked, timeout, FIRST_EXCEPTION)
    for answer in done:
        answer.result()
    if waiting:
        raise SeedError(f"{seeder} did not write version {state.served} to {engine} within {timeout:g} s")
    return state.served


def seed_at_start(seeders: Sequence[Address], engine: Address, key: ClusterKey | None) -> None:
    """By the first of them that can; where none can the engine goes on with what it has. Blocks until it
    is so."""
    problems: list[str] = []
    with questions(key) as links:
        for seeder in seeders:
            try:
                version = seed(seeder, engine, links, SEED_S)
            except SeedError as error:
                problems.append(str(error))
                continue
            logger.info("weights: seeded by %s with version %s", seeder, version)
            return
    logger.warning(
        "weights: none of seed_from could seed this engine, which goes on with what it has: %s",
        "; ".join(problems),
    )
