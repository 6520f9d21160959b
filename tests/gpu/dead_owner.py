#!/usr/bin/env python3
"""Checks that kernels may go on storing into the memory of a process that was killed.

    tests/gpu/dead_owner.py [--rounds N] [--gpus two|one] [--owner idle|waits|stores] [--out FILE]

Two processes have a group of experts. The survivor's dispatch kernels store into the owner's segment and its
combine kernels load from there, without a pause. The owner is killed meanwhile. The survivor goes on. Then
stores have to land, loads have to return the right bytes, and the survivor's context has to work. Another
process fills nine tenths of the free memory of the owner's GPU, which must not reach the segment. After the
owner's process has ended, no store of the owner may land in the survivor's segment.

The owner is idle, has a kernel that waits, or stores into the survivor's segment when it is killed. Prints a
JSON line for each case and exits with 1 if one is not harmless. Needs GPUs and the extension `_native` with
kernels. torch is not needed. The log of a run is in
docs/benchmarks/2026-11-29-experts.md.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))

from kv_connector import _native
from kv_connector.engine import TransferError

HIDDEN, TOKENS = 7168, 128
ROW = 2 * HIDDEN
ROWS = TOKENS * ROW  # bytes of one rank's rows
AREA = 2 * ROWS
BURST = 32  # pairs of dispatch and combine between two synchronizations
# Positions of flags: native/moe/layout.h. The survivor sets its own flags far ahead, so that no kernel waits.
READY, FLAG_BYTES, AHEAD = 8 * 128, 128, 1 << 30
SEND, RECEIVE = 1, 2
REPLY_SECONDS = 60.0
AFTER_SECONDS = 1.0


class Cuda:
    """The driver's context of one GPU, current in this thread."""

    def __init__(self, gpu: int) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self("cuInit", 0)
        self.gpu = gpu
        device, context, self.stream = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        self("cuDeviceGet", ctypes.byref(device), gpu)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), device.value)
        self("cuCtxPushCurrent_v2", context)
        self("cuStreamCreateWithPriority", ctypes.byref(self.stream), 1, 0)

    def __call__(self, name: str, *arguments: Any) -> None:
        call = getattr(self._library, name)
        result = call(*(ctypes.c_uint64(one) if isinstance(one, int) else one for one in arguments))
        if result:
            raise RuntimeError(f"{name}: CUDA error {result}")

    def synchronize(self) -> None:
        self("cuStreamSynchronize", self.stream)

    def allocate(self, nbytes: int) -> int:
        address = ctypes.c_uint64()
        self("cuMemAlloc_v2", ctypes.byref(address), nbytes)
        return address.value

    def write(self, address: int, data: bytes) -> None:
        self("cuMemcpyHtoD_v2", address, data, len(data))

    def read(self, address: int, nbytes: int) -> bytes:
        data = ctypes.create_string_buffer(nbytes)
        self("cuMemcpyDtoH_v2", data, address, nbytes)
        return data.raw

    def free_bytes(self) -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def rounded(self, nbytes: int) -> int:
        """The length of the piece that holds a segment of ``nbytes``."""
        properties = (ctypes.c_int * 8)(1, 1, 1, self.gpu)  # pinned, by descriptor, on this GPU
        unit = ctypes.c_size_t()
        self("cuMemGetAllocationGranularity", ctypes.byref(unit), properties, 0)
        return (nbytes + unit.value - 1) // unit.value * unit.value

    def map(self, descriptor: int, nbytes: int) -> int:
        """Maps a piece of another process, as native/cuda/virtual_memory.cc does."""
        handle, address = ctypes.c_uint64(), ctypes.c_uint64()
        self("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(descriptor), 1)
        self("cuMemAddressReserve", ctypes.byref(address), nbytes, 0, 0, 0)
        self("cuMemMap", address.value, nbytes, 0, handle.value, 0)
        self("cuMemRelease", handle.value)
        self("cuMemSetAccess", address.value, nbytes, (ctypes.c_int * 3)(1, self.gpu, 3), 1)
        return address.value

    def unmap(self, address: int, nbytes: int) -> None:
        self("cuMemUnmap", address, nbytes)
        self("cuMemAddressFree", address, nbytes)


class Rank:
    """A rank of the group of two, with the other rank's segment mapped a second time for copies."""

    def __init__(self, rank: int, gpu: int, link: socket.socket) -> None:
        self.cuda = Cuda(gpu)
        self.group = _native.MoeGroup(rank, 2, gpu, AREA, AREA, TOKENS, 2, 1, 20.0)
        own = self.group.descriptor()
        socket.send_fds(link, [b"x"], [own])
        _, [theirs], _, _ = socket.recv_fds(link, 1, 1)
        self.group.attach(1 - rank, theirs)
        self.peer_bytes = self.cuda.rounded(self.group.segment_bytes)
        self.peer = self.cuda.map(theirs, self.peer_bytes)
        os.close(own)
        os.close(theirs)
        self.rows_at, self.results_at = self.group.dispatch_offset(0), self.group.combine_offset(0)
        self.source, self.out = self.cuda.allocate(ROWS), self.cuda.allocate(ROWS)
        self.launches = 0
        self.slowest = 0.0

    def send(self) -> None:
        """Stores this rank's rows into both segments."""
        columns = [(self.source, ROW, 0, True)]
        stream = self.cuda.stream.value or 0
        self.group.dispatch(stream, 0, [TOKENS, TOKENS], 0, 4, 1, columns, SEND)
        self.launches += 1

    def sum(self) -> None:
        """Loads the results for this rank's rows from both segments. Waits for flags of this segment."""
        stream = self.cuda.stream.value or 0
        self.group.combine(stream, 0, [TOKENS, TOKENS], self.out, HIDDEN, False, RECEIVE)
        self.launches += 1

    def burst(self) -> None:
        begin = time.monotonic()
        for _ in range(BURST):
            self.send()
            self.sum()
        self.cuda.synchronize()
        self.slowest = max(self.slowest, time.monotonic() - begin)


def bf16(values: list[int]) -> bytes:
    """One row for each token, all alike. Integers up to 256 are exact in bf16."""
    row = b"".join(struct.pack("<f", value)[2:] for value in values)
    return row * TOKENS


RESULTS = [[i % 100 for i in range(HIDDEN)], [7 * i % 100 for i in range(HIDDEN)]]
SUMS = bf16([one + other for one, other in zip(*RESULTS, strict=True)])


def report(**values: Any) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def told(seconds: float) -> bool:
    """Whether the parent has written a line."""
    if not select.select([sys.stdin.fileno()], [], [], seconds)[0]:
        return False
    if not os.read(sys.stdin.fileno(), 1):
        sys.exit("the parent has ended")
    return True


def own(gpu: int, link: socket.socket, kind: str) -> None:
    rank = Rank(1, gpu, link)
    rank.cuda.write(rank.group.base + rank.results_at, bf16(RESULTS[1]))
    rank.cuda.write(rank.source, os.urandom(ROWS))
    rank.send()
    rank.cuda.synchronize()
    if kind == "waits":  # for a flag that the survivor never sets
        rank.sum()
    report(state="ready")
    while kind == "stores":
        for _ in range(BURST):
            rank.send()
        rank.cuda.synchronize()
    signal.pause()


def survive(gpu: int, link: socket.socket) -> None:
    rank = Rank(0, gpu, link)
    cuda, base = rank.cuda, rank.group.base
    for other in range(2):
        cuda.write(base + READY + other * FLAG_BYTES, struct.pack("<I", AHEAD))
    cuda.write(base + rank.results_at, bf16(RESULTS[0]))
    first, second, zeros = os.urandom(ROWS), os.urandom(ROWS), bytes(ROWS)
    cuda.write(rank.source, first)
    rank.burst()
    report(state="ready")
    told(REPLY_SECONDS)  # the owner has its results in place
    problems: list[str] = []

    def expect(what: str, good: bool) -> None:
        if not good:
            problems.append(what)

    def check(moment: str, rows: bytes) -> None:
        expect(f"{moment}: sums", cuda.read(rank.out, ROWS) == SUMS)
        expect(f"{moment}: rows in the own segment", cuda.read(base + rank.rows_at, ROWS) == rows)
        expect(f"{moment}: rows in the owner's segment", cuda.read(rank.peer + rank.rows_at, ROWS) == rows)
        results = cuda.read(rank.peer + rank.results_at, ROWS)
        expect(f"{moment}: results in the owner's segment", results == bf16(RESULTS[1]))
        cuda("cuCtxSynchronize")
        fault = rank.group.fault()
        expect(f"{moment}: fault {fault}", fault is None)

    counts: dict[str, float] = {}
    try:
        rank.burst()
        check("before", first)
        rank.launches, rank.slowest = 0, 0.0
        report(state="storing")
        while not told(0):
            rank.burst()
        counts["launches_until_death"] = rank.launches
        counts["slowest_burst_ms"] = round(1e3 * rank.slowest, 2)
        # A late store of the owner would change the rows of its tokens or its flag.
        cuda.write(base + rank.rows_at + ROWS, zeros)
        cuda.write(base + FLAG_BYTES, zeros[:4])
        rank.launches, end = 0, time.monotonic() + AFTER_SECONDS
        while time.monotonic() < end:
            rank.burst()
        expect("a late row of the owner", cuda.read(base + rank.rows_at + ROWS, ROWS) == zeros)
        expect("a late flag of the owner", cuda.read(base + FLAG_BYTES, 4) == zeros[:4])
        check("after the death", first)
        cuda.write(rank.source, second)
        rank.burst()
        check("new rows after the death", second)
        copied = os.urandom(ROWS)
        cuda.write(rank.peer + rank.rows_at + ROWS, copied)  # the rows of the owner's own tokens
        report(state="checked")
        told(REPLY_SECONDS)
        rank.burst()
        check("after the filling", second)
        expect("a copy", cuda.read(rank.peer + rank.rows_at + ROWS, ROWS) == copied)
        counts["launches_after_death"] = rank.launches
        rank.group.close(10.0)
        cuda.unmap(rank.peer, rank.peer_bytes)
        fresh = cuda.allocate(ROWS)
        cuda.write(fresh, second)
        expect("memory after the group", cuda.read(fresh, ROWS) == second)
        cuda("cuCtxSynchronize")
    except (RuntimeError, TransferError) as error:
        problems.append(str(error))
    report(state="done", problems=problems, **counts)


def fill(gpu: int, nbytes: int) -> None:
    cuda = Cuda(gpu)
    left = nbytes or cuda.free_bytes() // 10 * 9
    filled = 0
    while left >= 1 << 20:
        piece = min(left, 1 << 30)
        cuda("cuMemsetD8_v2", cuda.allocate(piece), 0xAB, piece)
        left, filled = left - piece, filled + piece
    cuda("cuCtxSynchronize")
    report(state="filled", mib=filled >> 20)
    told(REPLY_SECONDS)


class Child:
    """A process of a case."""

    def __init__(self, role: str, gpu: int, link: socket.socket | None, *options: str) -> None:
        self.role = role
        descriptors = [] if link is None else [link.fileno()]
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--role", role, "--gpu", str(gpu),
             *(f"--link={descriptor}" for descriptor in descriptors), *options],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, pass_fds=descriptors,
        )  # fmt: skip

    def wait_for(self, state: str) -> dict[str, Any]:
        """Returns the next report, of that state. Raises RuntimeError if it does not come."""
        assert self.process.stdout is not None
        line = b""
        end = time.monotonic() + REPLY_SECONDS
        while not line.endswith(b"\n"):
            left = end - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                raise RuntimeError(f"the {self.role} hangs before {state}")
            if not (data := os.read(self.process.stdout.fileno(), 1)):
                raise RuntimeError(f"the {self.role} ended before {state}")
            line += data
        found: dict[str, Any] = json.loads(line)
        if found["state"] == "done" and found["problems"]:
            raise RuntimeError("; ".join(found["problems"]))
        if found["state"] != state:
            raise RuntimeError(f"the {self.role} is {found['state']}, not {state}")
        return found

    def tell(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def run_case(gpus: tuple[int, int], kind: str, fill_mib: int) -> dict[str, Any]:
    one, other = socket.socketpair()
    children = [Child("survive", gpus[0], one), Child("own", gpus[1], other, "--owner", kind)]
    survivor, owner = children
    one.close()
    other.close()
    try:
        survivor.wait_for("ready")
        owner.wait_for("ready")
        survivor.tell()
        survivor.wait_for("storing")
        time.sleep(random.uniform(0.05, 0.4))
        killed = time.monotonic()
        owner.process.kill()
        owner.process.wait()
        ended = time.monotonic() - killed
        survivor.tell()
        survivor.wait_for("checked")
        filler = Child("fill", gpus[1], None, "--fill-mib", str(fill_mib))
        children.append(filler)
        filled = filler.wait_for("filled")["mib"]
        survivor.tell()
        counts = survivor.wait_for("done")
        del counts["state"], counts["problems"]
        return {"harmless": True, **counts, "end_of_owner_ms": round(1e3 * ended, 1), "filled_mib": filled}
    except RuntimeError as error:
        return {"harmless": False, "problem": str(error)}
    finally:
        for child in children:
            child.end()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="kills in each case (default: 3)")
    parser.add_argument("--gpus", choices=("two", "one"), help="default: both")
    parser.add_argument("--owner", choices=("idle", "waits", "stores"), help="default: all")
    parser.add_argument("--fill-mib", type=int, default=0, help="0: 9/10 of the free memory")
    parser.add_argument("--out", help="file to append the lines to")
    for hidden, type_ in (("--role", str), ("--gpu", int), ("--link", int)):
        parser.add_argument(hidden, type=type_, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "fill":
        fill(options.gpu, options.fill_mib << 20)
        return 0
    if options.role:
        link = socket.socket(fileno=options.link)
        if options.role == "own":
            own(options.gpu, link, options.owner)
        else:
            survive(options.gpu, link)
        return 0
    bad = 0
    for placement, gpus in (("two", (0, 1)), ("one", (0, 0))):
        if options.gpus not in (None, placement):
            continue
        for kind in ("idle", "waits", "stores"):
            if options.owner not in (None, kind):
                continue
            for number in range(1, options.rounds + 1):
                found = run_case(gpus, kind, options.fill_mib)
                bad += not found["harmless"]
                line = json.dumps({"gpus": placement, "owner": kind, "round": number, **found})
                sys.stdout.write(line + "\n")
                sys.stdout.flush()
                if options.out:
                    with Path(options.out).open("a") as file:
                        file.write(line + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
