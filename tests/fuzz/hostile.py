"""Hostile peers against a live engine: `make hostile`, or `python -m tests.fuzz.hostile --help`.

Strangers and malicious peers flood, guess, forge and scribble, while an honest peer plays ping-pong with the
same engine and counts.

The exit status reports harm: an inexact count, a page with other contents than written, a broken honest link,
or memory and descriptors that remain. The slowdown of the honest peer is printed, not judged.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from suite_numbers import whole

from tests.conformance import gpu
from tests.fuzz import wire
from tests.fuzz.hostile_same_host import SameHostAttacker
from tests.fuzz.hostile_tcp import TcpAttacker
from tests.fuzz.peers import Times, stage
from tests.fuzz.tally import Attack, Tally

LANES = ("tcp", "host", "nvlink")
# Python's and malloc's pools settle within this.
GROWTH_MIB = 16.0
# tcp's ended connections linger for 1 s; a busy machine takes longer.
SETTLING = 30.0
# Quiet time before each attack, for comparison: this process is as busy as during one, without an attack.
QUIET = 2.0


class Campaign:
    """One lane with a victim, an honest peer, and this process as the attacker."""

    def __init__(self, victim: Any, honest: Any, attacker: TcpAttacker | SameHostAttacker) -> None:
        self._victim = victim
        self._honest = honest
        self._attacker = attacker

    def run(self, frames: int) -> Iterator[str]:
        """Yields a report per attack. Raises AssertionError if the victim was harmed."""
        # First round, so that the memory pools reach their size.
        done = [self._against(name, attack, 1)[0] for name, (attack, _) in self._attacker.attacks.items()]
        yield f"{len(done)} attacks of {sum(tally.frames for tally in done):,} frames"
        resident = self._victim.state().resident_mib
        for name, (attack, share) in self._attacker.attacks.items():
            before = self._measure(_be_busy)
            began = time.monotonic()
            tally, during = self._against(name, attack, max(frames * share // 100, 1))
            yield _line(name, tally, time.monotonic() - began, before, during)
        state = self._victim.state()
        growth, peak = state.resident_mib - resident, state.peak_mib - resident
        held = self._attacker.held_at_most() / (1 << 20)
        assert growth < GROWTH_MIB, f"memory grew by {growth:.1f} MiB"
        assert peak < GROWTH_MIB + held, f"memory grew by up to {peak:.1f} MiB; {held:.1f} are due to links"
        stats = state.stats
        yield (
            f"{state.counted:,} pages of the honest peer's counted, exactly; {stats.immediates_stale:,} that "
            f"are nobody's and {stats.immediates_foreign:,} foreign ones were not; "
            f"memory {growth:+.1f} MiB, {peak:+.1f} at most"
        )

    def _measure(self, during: Callable[[], None]) -> Times:
        self._honest.begin()
        try:
            during()
        finally:
            times: Times = self._honest.end()
        return times

    def _against(self, name: str, attack: Attack, frames: int) -> tuple[Tally, Times]:
        before = self._victim.state()
        tally = Tally()

        def during() -> None:
            nonlocal tally
            tally = attack(frames)

        times = self._measure(during)
        # The engine frees resources only while it is awake, so the ping-pong continues.
        self._settle(name, before.descriptors)
        written, pages = self._honest.written()
        # A transfer is done for the honest peer before the victim's thread has counted the page.
        _until(lambda: self._victim.counted() >= written, f"{name}: all {written} pages are counted")
        state = self._victim.state()
        assert not state.found, f"{name}: {state.found}"
        assert state.counted == written, f"{name}: {written} pages were written, {state.counted} counted"
        assert state.pages == pages, f"{name}: the honest peer's pages are not what it has written"
        assert state.guarded, f"{name}: bytes beside the region were written"
        foreign = state.stats.immediates_foreign - before.stats.immediates_foreign
        # Not exactly: a random immediate may be the right one by chance.
        assert foreign >= tally.foreign, f"{name}: of {tally.foreign} foreign pages {foreign} were found out"
        return tally, times

    def _settle(self, name: str, descriptors: int) -> None:
        # The engine frees resources only while it is awake.
        self._honest.begin(newcomers=False)
        _until(self._victim.settled, f"{name}: all hostile peers are gone, and what was on its way to them")
        _until(lambda: self._victim.descriptors() <= descriptors, f"{name}: no descriptor is left open")
        self._honest.end()


def gpu_driver(directory: Path) -> str | None:
    """Returns the CUDA driver's stand-in if the machine has no GPU. None: the real driver."""
    return None if gpu.real_driver() else gpu.build_stand_in(directory)


def campaign(lane: str, frames: int, seed: str, driver: str | None) -> Generator[str, None, None]:
    with contextlib.ExitStack() as stack:
        victim, honest = stack.enter_context(stage(lane, driver))
        immediate = honest.immediate()
        attacker: TcpAttacker | SameHostAttacker
        if lane == "tcp":
            attacker = TcpAttacker(victim, immediate, seed)
        else:
            attacker = SameHostAttacker(wire.HOST if lane == "host" else wire.NVLINK, victim, immediate, seed)
            stack.callback(attacker.close)
        yield from Campaign(victim, honest, attacker).run(frames)


def _until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SETTLING
    while not condition():
        assert time.monotonic() < deadline, f"not in {SETTLING:.0f} s: {what}"
        time.sleep(0.01)


def _be_busy() -> None:
    until = time.monotonic() + QUIET
    while time.monotonic() < until:
        pass


def _line(name: str, tally: Tally, seconds: float, before: Times, during: Times) -> str:
    newcomers = f"{during.newcomers} newcomers, the slowest {during.newcomers_slowest:.0f} ms"
    if during.newcomers_refused:
        newcomers += f", {during.newcomers_refused} refused"
    return (
        f"{name:22}{tally.frames:>10,} in {seconds:5.0f} s over {tally.links:,} links; ping-pong "
        f"p50 {during.median:.0f} us ({during.median / before.median:.2f}), "
        f"p99 {during.p99:.0f} ({during.p99 / before.p99:.2f}), {during.slowest:.0f} at most; {newcomers}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=whole, default=10_000_000, help="of all lanes together")
    parser.add_argument("--lanes", nargs="+", choices=LANES, default=LANES)
    parser.add_argument("--seed", default=str(time.time_ns()))
    options = parser.parse_args()
    print(f"seed {options.seed}; ratios are to the quiet time before each attack", flush=True)
    with TemporaryDirectory() as directory:
        driver = gpu_driver(Path(directory))
        for lane in options.lanes:
            print(f"== {lane}", flush=True)
            for line in campaign(lane, options.frames // len(options.lanes), options.seed, driver):
                print(line, flush=True)


if __name__ == "__main__":
    main()
