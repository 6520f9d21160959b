"""Bugs of the kinds that others have had, as replacements in the source: the simulator must find each of
them.

`plant` copies the package and puts one in. What to look for in the wild stands beside each.
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
    first: int = 0  # the seed to begin with, where the first that finds it is far off


BUGS = (
    # D waits for a token that P said before D had asked.
    Bug(
        "what was sampled is not said to a decode that comes late",
        "protocol/prefill_machine.py",
        """\
        if prompt.finished:
            actions += [*_say_sampled(peer, message, prompt), *self._seal(now, transfer)]
""",
        """\
        if prompt.finished:
            actions += self._seal(now, transfer)
""",
    ),
    # P goes on pushing from blocks that a preemption has given to somebody else.
    Bug(
        "preemption forgets nothing",
        "protocol/prefill_machine.py",
        """\
            transfer.forget_pages()
        return tuple(""",
        """\
            pass
        return tuple(""",
    ),
    # A preempted prompt is computed again, and each page that had gone goes once more.
    Bug(
        "the ledger forgets what was pushed",
        "protocol/plan.py",
        "target = wanted.pop(granule, None)",
        "target = wanted.get(granule)",
    ),
    # vLLM's NixlConnector had the like: an abort frees D's blocks while pages are under way.
    Bug(
        "a cancel is acknowledged before it has drained",
        "protocol/share_ends.py",
        """\
        if not reservation.writing:
            return self.drained(now, transfer, quiesced=True)
""",
        """\
        if not reservation.writing or verdict.outcome is Outcome.CANCELLED:
            return self.drained(now, transfer, quiesced=True)
""",
    ),
    # P's failed writes may still sit in a buffer of D's.
    Bug(
        "a failure is always called quiesced",
        "protocol/share_ends.py",
        """\
        reservation, verdict = transfer.reservation, transfer.verdict
        assert reservation is not None
        assert verdict is not None
        transfer.verdict = Verdict(""",
        """\
        reservation, verdict, quiesced = transfer.reservation, transfer.verdict, True
        assert reservation is not None
        assert verdict is not None
        transfer.verdict = Verdict(""",
        first=710,
    ),
    # A tenth of the clients leaves, and an alert says that transfers fail.
    Bug(
        "a prompt that its client leaves has failed",
        "protocol/share_ends.py",
        """\
        case FailCode.PREFILL_ABORTED:
            return Outcome.CANCELLED
""",
        "",
    ),
    # EngineCore dies of an id that it has not finished.
    Bug(
        "a prompt is reported as sent while its engine still works on it",
        "protocol/share_ends.py",
        """\
        if prompt.request is not None and not prompt.finished:
            return []
""",
        "",
    ),
    # The blocks of a prompt that nobody comes for are never free again.
    Bug(
        "no hold time",
        "protocol/prefill_machine.py",
        """\
            if transfer.phase is SharePhase.WAITING:
                self._hold(now, transfer)
            elif""",
        """\
            if transfer.phase is SharePhase.WAITING:
                pass
            elif""",
    ),
    # A CANCEL that overtakes its RESERVE: P begins to write into blocks that are somebody else's.
    Bug(
        "an early cancel is forgotten",
        "protocol/prefill_machine.py",
        "return [acknowledged, *self._ends.forbid(now, message.transfer_id, cancelled)]",
        "return [acknowledged]",
        first=90,
    ),
    # D takes its blocks back on P's word that it failed, which is no word that nothing lands.
    Bug(
        "no fence after a failure with writes in flight",
        "protocol/decode_machine.py",
        """\
        if not message.quiesced:
""",
        """\
        if False:
""",
        first=710,
    ),
    # The peer is dead, its writes are not.
    Bug(
        "blocks come back with the peer's death, not with its fence",
        "protocol/decode_machine.py",
        """\
            actions += self._give_up(now, transfer, reason, peer)
        return actions
""",
        """\
            actions += self._give_up(now, transfer, reason, peer)
        return [*actions, *self.fenced(now, peer)]
""",
    ),
    # The retry after a fence that needs time is what makes it one.
    Bug(
        "a fence that is not through counts as one",
        "agent/effects.py",
        "not in (ErrorCode.UNKNOWN_PEER, ErrorCode.CLOSED):",
        "not in (ErrorCode.UNKNOWN_PEER, ErrorCode.CLOSED, ErrorCode.TIMEOUT):",
    ),
    # A machine that lost its power says no goodbye.
    Bug(
        "silence is never death",
        "protocol/sessions.py",
        '            return self.drop(now, peer.peer, f"silent for {silence:.1f} s")\n',
        "            peer.last_seen = now\n",
    ),
    # A peer that was replaced is still believed to be there: vLLM's connectors kept its state for ever.
    Bug(
        "the end of a session is not told to the transfers",
        "agent/effects.py",
        "            *self.decode.peer_down(now, peer, reason),\n",
        "",
    ),
    # D's deadline ends the wait, and leaves the blocks to a P that still writes.
    Bug(
        "the deadline frees the blocks at once",
        "protocol/decode_machine.py",
        """\
                actions += self._give_up(now, transfer, f"not complete within {self._timeouts.transfer:g} s")
""",
        """\
                actions += self._end(now, transfer, Outcome.FAILED, "not complete in time")
""",
        first=2290,
    ),
    # Several workers of D read one of P: its blocks come back when the first has what it wants.
    Bug(
        "a prompt is over with its first share",
        "protocol/shares.py",
        "        return all(transfer.phase is SharePhase.CLOSED for transfer in self.shares)\n",
        "        return any(transfer.phase is SharePhase.CLOSED for transfer in self.shares)\n",
    ),
    # Pages come from several engines, one of which still writes.
    Bug(
        "a transfer is over with its first source",
        "protocol/legs.py",
        "        return all(leg.phase is LegPhase.STOPPED for leg in self.legs)\n",
        """\
        stopped = [leg.phase is LegPhase.STOPPED for leg in self.legs]
        return not stopped or any(stopped)
""",
    ),
    # sgl-project/sglang #23746: which of P's heads D has comes out as the first of them.
    Bug(
        "a slice of the heads begins with the first",
        "protocol/runs.py",
        "        source_start += (units.start - source.units.start) * ours.stride\n",
        "",
    ),
    # Where a block is larger than the other side's, its end may hold nothing that anybody computes.
    Bug(
        "the count has what is behind the prompt's end",
        "protocol/plan.py",
        """\
            granules = pair.granules(targets[pair.target], prompt_tokens)
""",
        """\
            granules = pair.granules(targets[pair.target], 1 << 40)
""",
    ),
    # vllm-project/vllm #45330, #45879: of P's ranks several have the same heads.
    Bug(
        "all replicas send",
        "protocol/sources.py",
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
    # A rank of P that has what others send too waits for a RESERVE that never comes.
    Bug(
        "a worker that sends nothing is not told",
        "protocol/decode_machine.py",
        "        return [*self._release(request.transfer_id, request.engine, idle), *self._open(transfer)]\n",
        "        return self._open(transfer)\n",
    ),
    # Of several shares, all ranks of D give the same one back.
    Bug(
        "one share is released by all",
        "protocol/decode_machine.py",
        "            message = Release(transfer_id, draw.share)\n",
        "            message = Release(transfer_id)\n",
        first=190,
    ),
    # RELEASE comes twice: D's engine and its worker both say it.
    Bug(
        "a share is released twice",
        "protocol/prefill_machine.py",
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


def plant(bug: Bug, where: Path) -> None:
    """A copy of the package with the bug in it, and of the simulator beside it."""
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "test_*")
    shutil.copytree(_ROOT / "kv_connector", where / "kv_connector", ignore=ignored)
    shutil.copytree(Path(__file__).parent, where / "tests" / "simulation", ignore=ignored)
    file = where / "kv_connector" / bug.file
    source = file.read_text()
    if source.count(bug.good) != 1:
        raise ValueError(f"the place for the bug {bug.name!r} is not in {bug.file} once: adapt planted.py")
    file.write_text(source.replace(bug.good, bug.bad))


# Prints the first violation of so many seeds. To look for the smallest scenario takes ten times as long.
_FIRST_VIOLATION = """
import sys
from tests.simulation.campaign import DRAWS, run
of, first, count = sys.argv[1], *map(int, sys.argv[2:])
violations = (run(DRAWS[of](seed))[1] for seed in range(first, first + count))
print(next(filter(None, violations), ""))
"""


def find(bug: Bug, of: str, seeds: int, where: Path) -> None:
    """Plants it, and has to find it."""
    plant(bug, where)
    done = _python(where, "-c", _FIRST_VIOLATION, of, str(bug.first), str(seeds))
    assert done.stdout.strip(), f"not found in {seeds} seeds: {done.stderr[-2000:]}"
    assert "the simulator failed" not in done.stdout


def simulate(where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the copy of the simulator that lies there, on the copy of the package beside it."""
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
