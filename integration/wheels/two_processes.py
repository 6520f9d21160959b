"""Pages from one process to another over a lane, with only the installed wheel.

two_processes.py LANE
"""

# ruff: noqa: T201  (its output is a line)
from __future__ import annotations

import multiprocessing
import sys
from multiprocessing.connection import Connection

import numpy as np

import kv_connector
from kv_connector.engine import DomainConfig, EngineConfig, PagedWrite, Pages
from kv_connector.engine.transfer_engine import TransferEngine

PAGES = 256
PAGE_BYTES = 16384
LIMIT = 60.0  # seconds; enough for an emulated processor


def engine(name: str, lane: str) -> TransferEngine:
    return TransferEngine(EngineConfig(name, [DomainConfig(lane)]))


def receive(lane: str, pipe: Connection) -> None:
    memory = bytearray(PAGES * PAGE_BYTES)
    with engine("receiver", lane) as receiver:
        region = receiver.register_buffer(memory)
        answer = receiver.accept("sender", pipe.recv())
        counters = receiver.alloc_counters(1)
        receiver.expect(counters.id, [PAGES])
        pipe.send((answer.data, receiver.region_descriptor(region), counters.immediates[0]))
        receiver.wait_counters(counters.id, LIMIT)
        pipe.send(bytes(memory))
        pipe.recv()


def main() -> None:
    lane = sys.argv[1]
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=receive, args=(lane, theirs))
    process.start()
    theirs.close()  # if the receiver dies, this ends the wait for its message
    memory = np.random.default_rng(1).integers(0, 256, (PAGES, PAGE_BYTES), dtype=np.uint8)
    order = np.random.default_rng(2).permutation(PAGES)
    with engine("sender", lane) as sender:
        region = sender.register_buffer(memory)
        offer = sender.offer("receiver")
        pipe.send(offer.data)
        answer, descriptor, immediate = pipe.recv()
        sender.complete(offer.peer, answer)
        target = sender.import_region(offer.peer, descriptor)
        transfer = sender.open_transfer(offer.peer)
        sources, targets = Pages(order, PAGE_BYTES), Pages(np.arange(PAGES), PAGE_BYTES)
        sender.write_pages(transfer, PagedWrite(PAGE_BYTES, region, sources, target, targets, immediate))
        sender.seal(transfer)
        assert sender.wait_transfer(transfer, LIMIT).pages == PAGES
        assert pipe.recv() == memory[order].tobytes()
        assert sender.lane(offer.peer) == lane
        pipe.send(None)
    process.join(LIMIT)
    assert process.exitcode == 0
    print(f"{lane}: {PAGES} pages of {PAGE_BYTES} bytes, each where it belongs; {kv_connector.__file__}")


if __name__ == "__main__":
    main()
