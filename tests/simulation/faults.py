"""Faults by name. ``who`` of a scenario's Fault is one engine, or the two ends of a connection."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kv_connector.protocol.wire.messages import Pong, encode

from .scenario import LENDING, LONELY, MUTUAL, Fault, draw_side, engine_of

if TYPE_CHECKING:
    from .actor import Actor
    from .fabric import Link
    from .surroundings import Surroundings


def strike(world: Surroundings, fault: Fault) -> None:
    """Injects the fault. A fault whose engine is dead already has no effect."""
    world.books.note("FAULT %s of %s for %.2f s", fault.kind, " and ".join(fault.who), fault.lasting)
    world.books.ended[fault.kind] += 1
    _FAULTS[fault.kind](world, fault)


def _lonely(effect: Callable[[Surroundings, Actor, Fault], None]) -> Callable[[Surroundings, Fault], None]:
    def apply(world: Surroundings, fault: Fault) -> None:
        process = world.processes.get(fault.who[0])
        if process is not None and not process.leaving:
            effect(world, process, fault)

    return apply


def _crash(world: Surroundings, process: Actor, fault: Fault, silently: bool = False) -> None:
    """Kills the process with -9, and usually restarts it at the same address after ``lasting``."""
    process.die(silently)
    if fault.coin % 4:
        world.clock.after(fault.lasting, lambda: world.start(process.name))


def _vanish(world: Surroundings, process: Actor, fault: Fault) -> None:
    """Cuts the power of the process's machine: no connection reports it."""
    _crash(world, process, fault, silently=True)


def _leave(world: Surroundings, process: Actor, fault: Fault) -> None:
    """Shuts the process down in good order, with BYE."""
    process.leave()
    if fault.coin % 4:
        after = world.times.drain + fault.lasting
        world.clock.after(after, lambda: process.dead and world.start(process.name))


def _replace(world: Surroundings, process: Actor, fault: Fault) -> None:
    """Ends the whole engine, and starts one of another shape at its address."""
    engine, _ = engine_of(process.name)
    world.replace(engine, draw_side(random.Random(fault.coin)), silently=fault.coin % 2 > 0)
    world.clock.after(fault.lasting, lambda: world.start_engine(engine))


def _stop(world: Surroundings, process: Actor, fault: Fault) -> None:
    """Sends SIGSTOP, and SIGCONT after ``lasting``."""
    process.stop()
    world.clock.after(fault.lasting, lambda: None if process.dead else process.resume())


def _stall(world: Surroundings, process: Actor, fault: Fault) -> None:
    """Gives the agent's thread no turn. The transfer engine's worker continues."""
    process.stalled_until = world.clock.now + fault.lasting


def _slow(world: Surroundings, process: Actor, fault: Fault) -> None:
    """Delays each turn of the agent."""
    process.slow_until = world.clock.now + fault.lasting
    process.slowness = (0.01, 0.1, 0.5)[fault.coin % 3]


def _budget(attribute: str) -> Callable[[Surroundings, Actor, Fault], None]:
    """Makes the next few writes or calls of the transfer engine fail."""

    def effect(world: Surroundings, process: Actor, fault: Fault) -> None:
        setattr(process.engine, attribute, 1 + fault.coin % 8)

    return effect


def _partition(world: Surroundings, fault: Fault) -> None:
    """Blocks control messages and data, for one coin in three each: both directions, or one of them."""
    first, second = fault.who
    ways = ([(first, second), (second, first)], [(first, second)], [(second, first)])[fault.coin % 3]
    for way in ways:
        until = world.clock.now + fault.lasting
        world.partitions[way] = max(until, world.partitions.get(way, 0.0))


def _loss(world: Surroundings, fault: Fault) -> None:
    """Drops control messages with probability 0.2, 0.5 or 1, by the coin. The connection stays open."""
    first, second = fault.who
    probability = (0.2, 0.5, 1.0)[fault.coin % 3]
    for way in ((first, second), (second, first)):
        world.losses[way] = (world.clock.now + fault.lasting, probability)


def _jam(world: Surroundings, fault: Fault) -> None:
    """Fills the queue of a connection, because the peer reads slowly: send() refuses."""
    first, second = fault.who
    way = (first, second) if fault.coin % 2 else (second, first)
    world.jams[way] = world.clock.now + fault.lasting


def _reset(world: Surroundings, fault: Fault) -> None:
    """Breaks the control connections between the two, which reconnect."""
    for name in fault.who:
        process = world.processes.get(name)
        for connection in list(process.port.dialled.values()) if process else ():
            if connection.target in fault.who:
                connection.broken()


def _cut(world: Surroundings, fault: Fault) -> None:
    """Breaks every data link between the two."""
    for process, link in _links(world, fault):
        delay = link.rng.uniform(0, 0.1)
        broken = functools.partial(process.engine.broken, link, "the cable is out")
        world.clock.after(delay, broken)


def _failover(world: Surroundings, fault: Fault) -> None:
    """Breaks one of several NICs."""
    for process, link in _links(world, fault):
        process.engine.fail_over(link)


def _links(world: Surroundings, fault: Fault) -> list[tuple[Actor, Link]]:
    first, second = (world.processes.get(name) for name in fault.who)
    if first is None or second is None:
        return []
    links = [link for link in first.engine.links if link.other(first.engine) is second.engine]
    return [(process, link) for link in links for process in (first, second)]


def _garbage(world: Surroundings, fault: Fault) -> None:
    """Makes a peer send an invalid message, or one that it must not send."""
    rng = random.Random(fault.coin)
    for name in fault.who:
        process = world.processes.get(name)
        for connection in list(process.port.dialled.values()) if process else ():
            if connection.target in fault.who:
                frame = encode(Pong(1)) if rng.random() < 0.5 else rng.randbytes(rng.randrange(40))
                connection.send(frame, to_router=rng.random() < 0.7)


def _pause(world: Any, fault: Fault) -> None:
    """Pauses the engine. It takes no step for borrowers meanwhile."""
    paused = world.lendings(fault.who[0])
    for lending in paused:
        lending.pause()

    def resume() -> None:
        for lending in paused:
            lending.resume()

    world.clock.after(fault.lasting, resume)


def _empty(world: Any, fault: Fault) -> None:
    """Empties the engine's prefix cache."""
    for lending in world.lendings(fault.who[0]):
        lending.empty()


_FAULTS: dict[str, Callable[[Surroundings, Fault], None]] = {
    "crash": _lonely(_crash),
    "vanish": _lonely(_vanish),
    "leave": _lonely(_leave),
    "replace": _lonely(_replace),
    "stop": _lonely(_stop),
    "stall": _lonely(_stall),
    "slow": _lonely(_slow),
    "error": _lonely(_budget("write_errors")),
    "stuck": _lonely(_budget("stuck_writes")),
    "refuse": _lonely(_budget("refusals")),
    "no handshake": _lonely(_budget("no_handshakes")),
    "no counters": _lonely(_budget("no_counters")),
    "not applied": _lonely(_budget("not_applied")),
    "not recorded": _lonely(_budget("not_recorded")),
    "partition": _partition,
    "loss": _loss,
    "jam": _jam,
    "reset": _reset,
    "cut": _cut,
    "failover": _failover,
    "garbage": _garbage,
    "pause": _pause,
    "empty": _empty,
}
assert set(_FAULTS) >= {*LONELY, *MUTUAL, *LENDING}
