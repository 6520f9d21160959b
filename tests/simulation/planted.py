"""Bugs of kinds that other projects have had, as replacements in the source. The simulator must find each of
them.

`plant` copies the package and inserts one. The comment at each bug describes its effect in production.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec

_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Bug:
    name: str
    file: str  # below kv_connector
    good: str  # occurs once
    bad: str
    first: int = 0  # first seed to run, if the first seed that finds the bug is far off


BUGS = (
    # D waits for a token that P sent before D requested it.
    Bug(
        "what was sampled is not said to a decode that comes late",
        "protocol/prefill/prefill_machine.py",
        """\
        if prompt.finished:
            actions += [*_say_sampled(peer, message, prompt), *self._seal(now, transfer)]
""",
        """\
        if prompt.finished:
            actions += self._seal(now, transfer)
""",
    ),
    # P sums blocks that may belong to another request.
    Bug(
        "a prompt is over before its pages are summed",
        "protocol/prefill/prefill_machine.py",
        """\
        return [SumPages(transfer.share, reservation.to_sum)]
""",
        """\
        sums = SumPages(transfer.share, reservation.to_sum)
        return [sums, *self._ends.complete(now, transfer)]
""",
    ),
    Bug(
        "pages of a preempted prompt are summed",
        "protocol/prefill/prefill_machine.py",
        """\
        if reservation.unsummed:  # the blocks may have had another content by then
""",
        """\
        if False:
""",
    ),
    # P still pushes from blocks that a preemption has given to another request.
    Bug(
        "preemption forgets nothing",
        "protocol/prefill/prefill_machine.py",
        """\
        for transfer in transfers:
            transfer.forget_pages()
            if""",
        """\
        for transfer in transfers:
            if""",
    ),
    # A preempted prompt is computed again, and each page that was sent is sent once more.
    Bug(
        "the ledger forgets what was pushed",
        "protocol/plans/plan.py",
        "target = wanted.pop(granule, None)",
        "target = wanted.get(granule)",
    ),
    # vLLM's NixlConnector had a similar bug: an abort frees D's blocks while pages are in flight.
    Bug(
        "a cancel is acknowledged before it has drained",
        "protocol/prefill/share_ends.py",
        """\
        if not reservation.writing:
            return self.drained(now, transfer, quiesced=True)
""",
        """\
        if not reservation.writing or verdict.outcome is Outcome.CANCELLED:
            return self.drained(now, transfer, quiesced=True)
""",
    ),
    # P's failed writes may still be in one of D's buffers.
    Bug(
        "a failure is always called quiesced",
        "protocol/prefill/share_ends.py",
        """\
        reservation, verdict = transfer.reservation, transfer.verdict
        assert reservation is not None
        assert verdict is not None
        transfer.verdict = RecordedEnd(""",
        """\
        reservation, verdict, quiesced = transfer.reservation, transfer.verdict, True
        assert reservation is not None
        assert verdict is not None
        transfer.verdict = RecordedEnd(""",
        first=710,
    ),
    # A tenth of the clients leaves, and an alert reports failing transfers.
    Bug(
        "a prompt that its client leaves has failed",
        "protocol/prefill/share_ends.py",
        """\
        case FailCode.PREFILL_ABORTED:
            return Outcome.CANCELLED
""",
        "",
    ),
    # EngineCore dies of an id that it has not finished.
    Bug(
        "a prompt is reported as sent while its engine still works on it",
        "protocol/prefill/share_ends.py",
        """\
        if prompt.request is not None and not prompt.finished:
            return []
""",
        "",
    ),
    # The blocks of a prompt that no engine fetches are never freed.
    Bug(
        "no hold time",
        "protocol/prefill/prefill_machine.py",
        """\
            if transfer.phase is SharePhase.WAITING:
                self._hold(now, transfer)
            elif""",
        """\
            if transfer.phase is SharePhase.WAITING:
                pass
            elif""",
    ),
    # A CANCEL overtakes its RESERVE: P begins to write into blocks of another request.
    Bug(
        "an early cancel is forgotten",
        "protocol/prefill/prefill_machine.py",
        "return [acknowledged, *self._ends.forbid(now, message.transfer_id, cancelled)]",
        "return [acknowledged]",
        first=90,
    ),
    # D takes its blocks back when P reports a failure, although pages may still land.
    Bug(
        "no fence after a failure with writes in flight",
        "protocol/decode/decode_machine.py",
        """\
        if not message.quiesced:
""",
        """\
        if False:
""",
        first=710,
    ),
    # The peer is dead, but its writes are not.
    Bug(
        "blocks come back with the peer's death, not with its fence",
        "protocol/decode/decode_machine.py",
        """\
            actions += self._give_up(now, transfer, reason, peer)
        return actions
""",
        """\
            actions += self._give_up(now, transfer, reason, peer)
        return [*actions, *self.fenced(now, peer)]
""",
    ),
    # A fence that needs time depends on being retried.
    Bug(
        "a fence that is not through counts as one",
        "agent/loop/effects.py",
        "not in (ErrorCode.UNKNOWN_PEER, ErrorCode.CLOSED):",
        "not in (ErrorCode.UNKNOWN_PEER, ErrorCode.CLOSED, ErrorCode.TIMEOUT):",
    ),
    # A machine that loses power sends no BYE.
    Bug(
        "silence is never death",
        "protocol/session/sessions.py",
        '            return self.drop(now, peer.peer, f"silent for {silence:.1f} s")\n',
        "            peer.last_seen = now\n",
    ),
    # A replaced peer still counts as present. vLLM's connectors kept its state for ever.
    Bug(
        "the end of a session is not told to the transfers",
        "agent/loop/effects.py",
        "            *self.decode.peer_down(now, peer, reason),\n",
        "",
    ),
    # D's deadline ends the wait, and frees the blocks while P still writes.
    Bug(
        "the deadline frees the blocks at once",
        "protocol/decode/decode_machine.py",
        """\
                actions += self._give_up(now, transfer, *transfer.overdue(self._timeouts))
""",
        """\
                actions += self._end(now, transfer, Outcome.FAILED, "not complete in time")
""",
        first=2290,
    ),
    # Several workers of D read one worker of P: its blocks are freed when the first has its pages.
    Bug(
        "a prompt is over with its first share",
        "protocol/prefill/shares.py",
        "        return all(transfer.phase is SharePhase.CLOSED for transfer in self.shares)\n",
        "        return any(transfer.phase is SharePhase.CLOSED for transfer in self.shares)\n",
    ),
    # Pages come from several engines, one of which still writes.
    Bug(
        "a transfer is over with its first source",
        "protocol/decode/legs.py",
        "        return all(leg.phase is LegPhase.STOPPED for leg in self.legs)\n",
        """\
        stopped = [leg.phase is LegPhase.STOPPED for leg in self.legs]
        return not stopped or any(stopped)
""",
    ),
    # sgl-project/sglang #23746: P always sends its first heads, whichever heads D has.
    Bug(
        "a slice of the heads begins with the first",
        "protocol/plans/runs.py",
        "        source_start += (units.start - source.units.start) * ours.stride\n",
        "",
    ),
    # If a block is larger than the other side's, its end may hold tokens that no engine computes.
    Bug(
        "the count has what is behind the prompt's end",
        "protocol/plans/plan.py",
        """\
            granules = pair.granules(targets[pair.target], prompt_tokens)
""",
        """\
            granules = pair.granules(targets[pair.target], 1 << 40)
""",
    ),
    # vllm-project/vllm #45330, #45879: several of P's ranks have the same heads.
    Bug(
        "all replicas send",
        "protocol/plans/sources.py",
        """\
                    sender = senders[ordinal % len(senders)]
                    wants = choice.setdefault(sender, [()] * len(own.layout.layers))
                    wants[ordinal] = (*wants[ordinal], number)
""",
        """\
                    for sender in senders:
                        wants = choice.setdefault(sender, [()] * len(own.layout.layers))
                        wants[ordinal] = (*wants[ordinal], number)
""",
    ),
    # A rank of P with heads that other ranks send as well waits for a RESERVE that never comes.
    Bug(
        "a worker that sends nothing is not told",
        "protocol/decode/decode_machine.py",
        "        return [*self._release(request.transfer_id, request.engine, idle), *self._open(transfer)]\n",
        "        return self._open(transfer)\n",
    ),
    # All ranks of D give the same one of several shares back.
    Bug(
        "one share is released by all",
        "protocol/decode/decode_machine.py",
        "            message = Release(transfer_id, draw.share)\n",
        "            message = Release(transfer_id)\n",
        first=190,
    ),
    # RELEASE arrives twice, from D's engine and from its worker.
    Bug(
        "a share is released twice",
        "protocol/prefill/prefill_machine.py",
        """\
        if transfer is None or transfer.phase is not SharePhase.WAITING:
            return []
        return self._ends.close(now, transfer, released)
""",
        """\
        if transfer is None:
            return []
        return self._ends.close(now, transfer, released)
""",
        first=100,
    ),
)

# Bugs of prefixes, which the worlds of prefixes must find.
PREFIX_BUGS = (
    # Decode engines that compute prompts alone borrow nothing: only prefill engines may.
    Bug(
        "a decode engine is refused as a borrower",
        "protocol/session/answering.py",
        "        if hello.role is Role.PREFILL and not prefixes:\n",
        "        if hello.role is (Role.DECODE if prefixes else Role.PREFILL):\n",
    ),
    # A borrower that loses power leaves pages in the lender's cache that are never evicted.
    Bug(
        "a prefix is held for ever",
        "protocol/prefill/prefill_machine.py",
        "hold = self._timeouts.lend if transfer.prompt.lent else self._timeouts.hold",
        "hold = 1000.0 if transfer.prompt.lent else self._timeouts.hold",
    ),
    # The lender evicts pages that are still being read. LMCache and NIXL count leases for the same reason.
    Bug(
        "a prefix is given back when its writes are posted",
        "protocol/prefill/prefill_machine.py",
        """\
        if reservation.writing:
            return [Seal(transfer.share)]
""",
        """\
        if reservation.writing and not transfer.prompt.lent:
            return [Seal(transfer.share)]
""",
    ),
    # vLLM's default policy for failed loads ends the request with an error.
    Bug(
        "a prefix that does not come fails its request",
        "protocol/decode/decode_machine.py",
        "stale = outcome is Outcome.STALE or (failed and request.engine.prefixes)",
        "stale = outcome is Outcome.STALE",
    ),
    # A lender that is a decode engine refuses the borrower at all workers but the first.
    Bug(
        "the lender's other workers are dialled for prompts",
        "protocol/decode/decode_machine.py",
        "Address(rank.host, rank.port, address.prefixes)",
        "Address(rank.host, rank.port)",
    ),
    # An engine that gets new weights waits for the borrowers of KV of the old ones, or lends it afterwards.
    Bug(
        "a lender that empties its cache goes on lending",
        "protocol/prefill/prefill_machine.py",
        "        lent = [prompt for prompt in self._prompts.values() if prompt.lent]\n",
        "        lent: list[Prompt] = []\n",
    ),
    # The lender's scheduler is given blocks that its NIC still reads.
    Bug(
        "a lender that empties its cache gives back what is being read",
        "protocol/prefill/share_ends.py",
        """\
        if not reservation.writing:
            return self.drained(now, transfer, quiesced=True)
""",
        """\
        if not reservation.writing or transfer.prompt.lent:
            return self.drained(now, transfer, quiesced=True)
""",
    ),
    # An engine that is updated answers no borrower for seconds, and each of their prompts waits for it.
    Bug(
        "a paused lender leaves borrowers without an answer",
        "protocol/prefill/prefill_machine.py",
        "        if self._lends_not:\n",
        "        if self._closing:\n",
    ),
    # Each prompt of a queue waits a second for an engine that is gone.
    Bug(
        "a lender that does not answer is asked again by each prompt",
        "protocol/decode/borrowing.py",
        "            question = self._questions[transfer_id]\n            self._remember(now, question)\n",
        "            question = self._questions[transfer_id]\n",
    ),
    # The prompt waits for an answer that a stopped lender never gives.
    Bug(
        "a question has no time limit",
        "protocol/decode/borrowing.py",
        "            actions += self._give_up(now, [question], LendOutcome.SILENT)\n",
        "            pass\n",
    ),
)

# Bugs of notices, which the worlds of short decode engines must find.
DEFER_BUGS = (
    # D's request waits until its time limit, minutes long, although P has computed its prompt.
    Bug(
        "a prompt begins without a notice",
        "protocol/prefill/prefill_machine.py",
        "        actions = self.due(now, pages.transfer_id)\n",
        "        actions: list[PrefillAction] = []\n",
    ),
    # D is dispatched first, so its DEFER is at P before the request.
    Bug(
        "a notice wanted before the request arrives is forgotten",
        "protocol/prefill/prefill_machine.py",
        "        self._due_notices.defer(now, peer, transfer_id, arrived=request is not None)\n",
        """\
        if request is not None:
            self._due_notices.defer(now, peer, transfer_id, arrived=True)
""",
    ),
    # With serial dispatch the prompt is computed before D knows of it.
    Bug(
        "a prompt that has begun gives no notice any more",
        "protocol/prefill/prefill_machine.py",
        "        known = prompt is not None and (prompt.due or prompt.finished or prompt.over)\n",
        "        known = prompt is not None and prompt.over\n",
    ),
    # The client leaves P first. D's request holds its place for minutes.
    Bug(
        "a prompt that ends before it begins gives no notice",
        "protocol/prefill/prefill_machine.py",
        "        due: list[PrefillAction] = [*self._due_notices.announce(transfer_id)]\n",
        "        due: list[PrefillAction] = []\n",
    ),
    # A request whose P never gets its half waits for minutes longer.
    Bug(
        "a notice for a request that never arrives has no time limit",
        "protocol/prefill/due_notices.py",
        "            self._timers.set(transfer_id, now + self._timeouts.orphan)\n",
        "            pass\n",
    ),
    # D loses the notice with its session, and never reserves.
    Bug(
        "a session ends and its notices are still awaited",
        "protocol/decode/deferring.py",
        "        self._announcing.discard(peer)\n        return self._end(",
        "        self._announcing.discard(peer)\n        return [] and self._end(",
    ),
    # The request of an engine that cannot be found waits instead of failing.
    Bug(
        "a notice of an engine that is not found is awaited",
        "protocol/decode/decode_machine.py",
        " + self.deferring.engine_not_found(address)\n",
        "\n",
    ),
    # An older engine takes DEFER for a malformed message, and drops the session with all its transfers.
    Bug(
        "an older engine gets DEFER",
        "protocol/decode/deferring.py",
        "        if peer not in self._announcing:\n",
        "        if False:\n",
    ),
    # The grant is lost: P sends it once.
    Bug(
        "a notice that arrives is not passed on",
        "protocol/decode/deferring.py",
        "        return [] if deferred is None or deferred.peer != peer else self._end([deferred])\n",
        "        return []\n",
    ),
)


def plant(bug: Bug, where: Path) -> None:
    """Copies the package with the bug in it, and the simulator beside it."""
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "test_*")
    shutil.copytree(_ROOT / "kv_connector", where / "kv_connector", ignore=ignored)
    shutil.copytree(Path(__file__).parent, where / "tests" / "simulation", ignore=ignored)
    file = where / "kv_connector" / bug.file
    source = file.read_text()
    if source.count(bug.good) != 1:
        raise ValueError(f"the place for the bug {bug.name!r} is not in {bug.file} once: adapt planted.py")
    file.write_text(source.replace(bug.good, bug.bad))


# Prints the first violation of these seeds. The search for the smallest scenario takes ten times as long.
_FIRST_VIOLATION = """
import sys
from tests.simulation.campaign import DRAWS, run
of, first, count = sys.argv[1], *map(int, sys.argv[2:])
violations = (run(DRAWS[of](seed))[1] for seed in range(first, first + count))
print(next(filter(None, violations), ""))
"""


def find(bug: Bug, of: str, seeds: int, where: Path) -> None:
    """Plants the bug, and checks that the simulator finds it."""
    plant(bug, where)
    done = _python(where, "-c", _FIRST_VIOLATION, of, str(bug.first), str(seeds))
    assert done.stdout.strip(), f"not found in {seeds} seeds: {done.stderr[-2000:]}"
    assert "the simulator failed" not in done.stdout


def simulate(where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the copy of the simulator in ``where``, on the copy of the package beside it."""
    return _python(where, "-m", "tests.simulation", *arguments)


def _python(where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # Without site (-S): the import hook of an editable install would come before PYTHONPATH.
    command = [sys.executable, "-S", *arguments]
    libraries = Path(msgspec.__file__).parent.parent
    path = f"{where}{os.pathsep}{libraries}"
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        command, cwd=where, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
