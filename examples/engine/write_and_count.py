"""Two processes: one writes pages into the memory of the other, which waits only for a count."""

import argparse
import multiprocessing
import time
from multiprocessing.connection import Connection

import numpy as np

from kv_connector.engine import DomainConfig, EngineConfig, PagedWrite, Pages
from kv_connector.engine.transfer_engine import SharedMemory, TransferEngine

PAGES, PAGE_BYTES = 1024, 64 << 10
SECONDS = 10.0  # time limit of each wait


def receive(lane: str, pipe: Connection) -> None:
    memory = SharedMemory("received", PAGES * PAGE_BYTES)
    pages = np.frombuffer(memoryview(memory), np.uint32).reshape(PAGES, -1)
    pages.fill(0)
    with TransferEngine(EngineConfig("receiver", [DomainConfig(lane)])) as engine:
        region = engine.register_buffer(memory)
        answer = engine.accept("sender", pipe.recv())
        # The counter exists before the sender can raise it, so no early write is lost.
        counters = engine.alloc_counters(1, raisers=[answer.peer])
        engine.expect(counters.id, [PAGES])
        pipe.send((answer.data, engine.region_descriptor(region), counters.immediates[0]))

        engine.wait_counters(counters.id, SECONDS)  # every page has arrived, in any order
        landed = time.monotonic()
        right = bool((pages == np.arange(PAGES, dtype=np.uint32)[::-1, None]).all())
        pipe.send((landed, right))
        pipe.recv()  # the sender has ended its work


def send(lane: str, pipe: Connection) -> None:
    memory = SharedMemory("sent", PAGES * PAGE_BYTES)
    np.frombuffer(memoryview(memory), np.uint32).reshape(PAGES, -1)[:] = np.arange(PAGES, dtype=np.uint32)[
        :, None
    ]
    with TransferEngine(EngineConfig("sender", [DomainConfig(lane)])) as engine:
        source = engine.register_buffer(memory)
        # Three byte strings go over any connection that both sides trust: a pipe here.
        offer = engine.offer("receiver")
        pipe.send(offer.data)
        answer, descriptor, immediate = pipe.recv()
        engine.complete(offer.peer, answer)
        target = engine.import_region(offer.peer, descriptor)

        started = time.monotonic()
        transfer = engine.open_transfer(offer.peer)
        engine.write_pages(
            transfer,
            PagedWrite(
                page_bytes=PAGE_BYTES,
                source=source,
                source_pages=Pages(range(PAGES), stride=PAGE_BYTES),
                target=target,
                # Any page here may go to any page there: the first becomes the last.
                target_pages=Pages(range(PAGES - 1, -1, -1), stride=PAGE_BYTES),
                # Arrives with each page, and raises the receiver's counter by one.
                immediate=immediate,
            ),
        )
        engine.seal(transfer)
        engine.wait_transfer(transfer, SECONDS)  # from here on the source pages may be reused

        landed, right = pipe.recv()
        seconds = landed - started
        print(
            f"{PAGES} pages of {PAGE_BYTES >> 10} KiB over {engine.lane(offer.peer)}, {right=}: counted "
            f"after {seconds * 1e3:.1f} ms, {PAGES * PAGE_BYTES / seconds / 1e9:.1f} GB/s"
        )
        pipe.send("done")
        if not right:
            raise SystemExit("wrong bytes have arrived")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lane", default="host", help="host (default) or tcp")
    lane = parser.parse_args().lane
    ours, theirs = multiprocessing.Pipe()
    receiver = multiprocessing.get_context("spawn").Process(target=receive, args=(lane, theirs))
    receiver.start()
    theirs.close()
    with ours:
        send(lane, ours)
    receiver.join()


if __name__ == "__main__":
    main()
