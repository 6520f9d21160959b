"""Registration of many buffers at once, and engines with memory of several kinds, over every lane."""

from __future__ import annotations

import pytest

from kv_connector.engine import DomainConfig, EngineConfig, ErrorCode, EventKind, MemoryRange, TransferError
from kv_connector.engine.convert import buffer_range
from kv_connector.engine.transfer_engine import SharedMemory, TransferEngine

from .gpu import GpuMemory
from .node import GPU_PROVIDERS, LIMIT, NewPair, Pair, domain_config

BUFFERS, NBYTES = 2000, 512


def import_all(pair: Pair, regions: list[int]) -> list[int]:
    return pair.engine.import_regions(pair.to_receiver, pair.at_receiver("region_descriptor", regions))


@pytest.mark.parametrize("gap", [0, 64], ids=["side by side", "apart"])
def test_thousands_of_buffers_are_registered_imported_and_given_back_together(
    new_pair: NewPair, gap: int
) -> None:
    stride = NBYTES + gap
    offsets = [stride * number for number in range(BUFFERS)][::-1]  # in an unfavourable order
    pair = new_pair(nbytes=BUFFERS * stride)
    pair.sender.fill(1)
    before = pair.at_receiver("stats").regions
    regions = pair.receiver.call("register_parts", offsets, NBYTES)
    assert pair.at_receiver("stats").regions == before + BUFFERS
    imported = import_all(pair, regions)
    assert len(set(imported)) == len(set(regions)) == BUFFERS
    chosen = range(0, BUFFERS, 7)
    counters, immediate = pair.counter(len(chosen))
    transfer = pair.engine.open_transfer(pair.to_receiver)
    expected = bytearray(BUFFERS * stride)
    for number in chosen:
        begin = offsets[number]
        pair.engine.write(transfer, pair.sender.region, begin, imported[number], 0, NBYTES, immediate)
        expected[begin : begin + NBYTES] = pair.sender.read(begin, NBYTES)
    for offset, nbytes in [(NBYTES, 1), (0, NBYTES + 1)]:  # each has the length that was registered
        with pytest.raises(TransferError) as refused:
            pair.engine.write(transfer, pair.sender.region, 0, imported[0], offset, nbytes)
        assert refused.value.code is ErrorCode.OUT_OF_RANGE
    pair.engine.seal(transfer)
    assert pair.engine.wait_transfer(transfer, LIMIT).pages == len(chosen)
    pair.await_counters(counters)
    assert pair.receiver.call("read") == expected

    pair.at_receiver("deregister_memory", regions, LIMIT)
    assert pair.at_receiver("stats").regions == before
    late = pair.engine.write_one(pair.to_receiver, pair.sender.region, 0, imported[0], 0, NBYTES)
    assert pair.engine.wait_transfer(late, LIMIT).kind is EventKind.TRANSFER_FAILED


def test_buffers_that_share_keys_are_given_back_together_or_not_at_all(new_pair: NewPair) -> None:
    pair = new_pair()
    pair.sender.fill(2)
    regions = pair.receiver.call("register_parts", [0, 1024, 2048], 1024)
    for some in (regions[:1], regions[1:]):
        with pytest.raises(TransferError, match="together") as refused:
            pair.at_receiver("deregister_memory", some, LIMIT)
        assert refused.value.code is ErrorCode.INVALID_ARGUMENT
    for region in import_all(pair, regions):
        written = pair.engine.write_one(pair.to_receiver, pair.sender.region, 0, region, 0, 1024)
        assert pair.engine.wait_transfer(written, LIMIT).kind is EventKind.TRANSFER_DONE
    assert pair.receiver.call("read", 0, 3072) == pair.sender.read(0, 1024) * 3
    pair.at_receiver("deregister_memory", regions[::-1], LIMIT)


def test_a_list_with_a_wrong_range_registers_nothing(new_pair: NewPair) -> None:
    pair = new_pair()
    good = pair.sender.part(0, 64)
    before = pair.engine.stats().regions
    for wrong in [MemoryRange(0, 64), MemoryRange(good.address, 0), MemoryRange(good.address, 2**64 - 1)]:
        with pytest.raises(TransferError) as refused:
            pair.engine.register_ranges([good, wrong])
        assert refused.value.code is ErrorCode.INVALID_ARGUMENT
    with pytest.raises(TransferError):
        pair.engine.register_ranges([])
    with pytest.raises(TransferError) as unknown:
        pair.engine.deregister_memory([pair.sender.region, 4711], LIMIT)
    assert unknown.value.code is ErrorCode.UNKNOWN_REGION
    assert pair.engine.stats().regions == before
    written = pair.engine.write_one(pair.to_receiver, pair.sender.region, 0, pair.receiver_region, 0, 64)
    assert pair.engine.wait_transfer(written, LIMIT).kind is EventKind.TRANSFER_DONE


# --- Memory of several kinds


def test_memory_that_no_lane_takes_is_refused_with_the_reason(
    new_pair: NewPair, provider: str, request: pytest.FixtureRequest
) -> None:
    if provider in ("verbs", "libfabric"):
        pytest.skip(f"whether {provider} takes a GPU's memory is the machine's affair")
    pair = new_pair()
    host = SharedMemory("host", 4096)
    strange = buffer_range(host)
    if provider not in GPU_PROVIDERS:
        gpu = GpuMemory(4096, 0, request.getfixturevalue("stand_in_driver"))
        request.addfinalizer(gpu.free)
        strange = MemoryRange(gpu.address, 4096)
    before = pair.engine.stats().regions
    if provider in ("bounce", "sim"):  # these accept both kinds
        pair.engine.deregister_memory(pair.engine.register_ranges([strange]), LIMIT)
        return
    with pytest.raises(TransferError, match="GPU") as refused:
        pair.engine.register_ranges([pair.sender.part(0, 64), strange])
    assert (refused.value.code, refused.value.provider) == (ErrorCode.NOT_REACHABLE, provider)
    assert pair.engine.stats().regions == before


def join(first: TransferEngine, second: TransferEngine) -> tuple[int, int]:
    """Connects two engines. Returns each one's number of its peer."""
    offer = first.offer(second.config.name)
    answer = second.accept(first.config.name, offer.data)
    first.complete(offer.peer, answer.data)
    return offer.peer, answer.peer


def test_one_engine_has_memory_of_both_kinds_and_each_lane_takes_its_own(
    stand_in_driver: str | None,
) -> None:
    gpu = GpuMemory(4096, 0, stand_in_driver)
    both = [domain_config("nvlink", 0), DomainConfig("tcp")]
    host, theirs = SharedMemory("ours", 4096), SharedMemory("theirs", 4096)
    memoryview(host)[:3] = b"abc"
    with (
        TransferEngine(EngineConfig("both", both)) as engine,
        TransferEngine(EngineConfig("tcp only", [DomainConfig("tcp")])) as tcp_only,
        TransferEngine(EngineConfig("nvlink only", both[:1])) as nvlink_only,
    ):
        in_gpu, in_host = engine.register_ranges([MemoryRange(gpu.address, 4096), buffer_range(host)])
        nvlink_only.register_memory(gpu.address, 4096)  # the lane requires some before it connects
        to_tcp, from_tcp = join(engine, tcp_only)
        to_nvlink, from_nvlink = join(engine, nvlink_only)
        assert (engine.lane(to_tcp), engine.lane(to_nvlink)) == ("tcp", "nvlink")
        target = engine.import_region(to_tcp, tcp_only.region_descriptor(tcp_only.register_buffer(theirs)))
        done = engine.wait_transfer(engine.write_one(to_tcp, in_host, 0, target, 0, 3), LIMIT)
        assert (done.kind, bytes(theirs)[:3]) == (EventKind.TRANSFER_DONE, b"abc")
        # The lane reports memory that it cannot use: a source at the write, a target at its import.
        failed = engine.wait_transfer(engine.write_one(to_tcp, in_gpu, 0, target, 0, 3), LIMIT)
        assert failed.error is not None
        assert (failed.kind, failed.error.code) == (EventKind.TRANSFER_FAILED, ErrorCode.NOT_REACHABLE)
        tcp_only.import_region(from_tcp, engine.region_descriptor(in_host))
        nvlink_only.import_region(from_nvlink, engine.region_descriptor(in_gpu))
        for other, peer, region in [(tcp_only, from_tcp, in_gpu), (nvlink_only, from_nvlink, in_host)]:
            with pytest.raises(TransferError, match="does not reach") as refused:
                other.import_region(peer, engine.region_descriptor(region))
            assert refused.value.code is ErrorCode.NOT_REACHABLE
    gpu.free()


def test_peers_over_different_lanes_write_into_one_region() -> None:
    memory = SharedMemory("one", 4096)
    lanes = [DomainConfig("host"), DomainConfig("tcp")]
    with TransferEngine(EngineConfig("both", lanes)) as engine:
        descriptor = engine.region_descriptor(engine.register_buffer(memory))
        counters = engine.alloc_counters(1)
        engine.expect(counters.id, [2])
        for number, lane in enumerate(lanes):
            with TransferEngine(EngineConfig("sender", [lane])) as sender:
                peer, _ = join(sender, engine)
                assert sender.lane(peer) == lane.provider
                source = SharedMemory("source", 64)
                memoryview(source)[:] = bytes([number + 1]) * 64
                transfer = sender.write_one(
                    peer,
                    sender.register_buffer(source),
                    0,
                    sender.import_region(peer, descriptor),
                    64 * number,
                    64,
                    counters.immediates[0],
                )
                assert sender.wait_transfer(transfer, LIMIT).kind is EventKind.TRANSFER_DONE
        engine.wait_counters(counters.id, LIMIT)
        assert bytes(memory)[:128] == b"\1" * 64 + b"\2" * 64
