"""The engines that a router uses, given their messages and their silence."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from kv_connector.control.membership import Leave, Register
from kv_connector.protocol.wire.messages import Role
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.incidents import Incidents
from kv_connector.router.engines.members import (
    MAX_ENGINES,
    Members,
    MemberStatus,
    RefusedRegistrationError,
    Side,
)
from kv_connector.router.engines.pool import EngineLost, Lease, NoEngine, Pool

URL = "http://10.0.0.1:8100"


class Fixture:
    """A Members without engines, or with listed engines."""

    def __init__(self, prefill: tuple[str, ...] = (), decode: tuple[str, ...] = ()) -> None:
        self.pools = {side: Pool() for side in Side}
        listed = {
            Side.PREFILL: [Endpoint.parse(url) for url in prefill],
            Side.DECODE: [Endpoint.parse(url) for url in decode],
        }
        self.members = Members(self.pools, listed, Incidents(), suspect=3.0, dead=5.0)

    def state(self, url: str = URL, side: Side = Side.PREFILL) -> MemberStatus | None:
        return self.members.states()[side].get(url)

    def usable(self, side: Side = Side.PREFILL) -> bool:
        return self.pools[side].usable()

    def join(self, now: float = 0.0, **changes: Any) -> None:
        """Adds an engine that registers, and whose API server answers."""
        self.members.register(now, register(**changes))
        for endpoint in self.members.to_probe():
            self.members.answered(endpoint)


def register(**changes: Any) -> Register:
    fields: dict[str, Any] = {
        "engine_id": "p",
        "incarnation": "1",
        "role": Role.PREFILL,
        "url": URL,
        "control_host": "10.0.0.1",
        "control_port": 5600,
    }
    return Register(**(fields | changes))


@pytest.fixture
def router() -> Fixture:
    return Fixture()


def test_an_engine_is_used_once_it_registered_and_answers(router: Fixture) -> None:
    router.members.register(0.0, register())
    assert router.state() is MemberStatus.JOINING
    assert not router.usable()
    (endpoint,) = router.members.to_probe()
    assert endpoint == Endpoint(URL, "10.0.0.1", 5600)
    router.members.answered(endpoint)
    assert router.state() is MemberStatus.READY
    assert router.pools[Side.PREFILL].acquire(router.pools[Side.PREFILL].fewest()).endpoint == endpoint
    assert not router.usable(Side.DECODE)
    assert router.members.to_probe() == []


def test_sleep_is_one_line_in_the_log_and_waking_another(
    router: Fixture, caplog: pytest.LogCaptureFixture
) -> None:
    router.join()
    with caplog.at_level(logging.INFO):
        for asleep in (True, True, False):
            router.members.register(0.1, register(asleep=asleep))
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["ASLEEP", "READY"]


def test_an_engine_for_both_is_on_both_sides(router: Fixture) -> None:
    router.join(role=Role.BOTH)
    assert router.usable(Side.PREFILL)
    assert router.usable(Side.DECODE)


def test_a_silent_engine_gets_nothing_new_and_then_loses_what_it_has(
    router: Fixture, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        router.join(0.0)
        lease = router.pools[Side.PREFILL].acquire(router.pools[Side.PREFILL].fewest())

        async def wait() -> None:
            async with lease.alive():
                await asyncio.Event().wait()

        waiting = asyncio.create_task(wait())
        for now in (1.0, 2.0, 2.9):
            router.members.tick(now)
        assert router.state() is MemberStatus.READY
        router.members.tick(3.0)
        assert router.state() is MemberStatus.SILENT
        assert not router.usable()
        await asyncio.sleep(0)
        assert not waiting.done(), "it may be back before it is dead"
        router.members.tick(5.0)
        assert router.state() is None
        with pytest.raises(EngineLost):
            await asyncio.wait_for(waiting, 60)
        with pytest.raises(EngineLost):
            async with lease.alive():
                pass
        lease.release()

    with caplog.at_level(logging.INFO):
        asyncio.run(scenario())
    words = [record.getMessage().split(":")[0] for record in caplog.records]
    assert words == ["JOINING", "READY", "SILENT", "DEAD"]


def test_engine_that_registers_again_is_used_again(router: Fixture) -> None:
    router.join(0.0)
    for now in (1.0, 2.0, 3.0, 4.0):
        router.members.tick(now)
    assert not router.usable()
    router.members.register(4.5, register())
    assert router.usable()
    router.members.tick(5.5)
    assert router.usable()


def test_router_that_was_stopped_itself_marks_no_engine_silent(router: Fixture) -> None:
    router.join(0.0)
    router.members.tick(1.0)
    router.members.tick(61.0)
    assert router.usable()
    for now in (62.0, 63.0, 64.0):
        router.members.tick(now)
    assert router.state() is MemberStatus.SILENT


def test_leaving_engine_is_unusable_at_once_and_its_requests_continue(router: Fixture) -> None:
    async def scenario() -> None:
        router.join()
        lease = router.pools[Side.PREFILL].acquire(router.pools[Side.PREFILL].fewest())
        router.members.leave(Leave("p", "0"))
        assert router.usable(), "that was an earlier process"
        router.members.leave(Leave("p", "1"))
        assert router.state() is None
        with pytest.raises(NoEngine):
            router.pools[Side.PREFILL].acquire(router.pools[Side.PREFILL].fewest())
        async with lease.alive():
            pass

    asyncio.run(scenario())


def test_a_draining_engine_gets_nothing_new(router: Fixture) -> None:
    router.join()
    lease = router.pools[Side.PREFILL].acquire(router.pools[Side.PREFILL].fewest())
    router.members.drain(URL)
    assert router.state() is MemberStatus.DRAINING
    assert not router.usable()
    assert router.members.outstanding(URL) == 1
    router.members.register(1.0, register())
    assert router.state() is MemberStatus.DRAINING, "the engine has not heard of it yet"
    lease.release()
    assert router.members.outstanding(URL) == 0


def test_another_router_receives_the_drain_from_the_engine(router: Fixture) -> None:
    router.join(draining=True)
    assert router.state() is MemberStatus.DRAINING


def test_a_restarted_engine_is_a_new_one(router: Fixture) -> None:
    async def scenario() -> None:
        router.join()
        router.members.drain(URL)
        lease = (
            router.pools[Side.PREFILL].acquire(router.pools[Side.PREFILL].fewest())
            if router.usable()
            else None
        )
        assert lease is None
        router.members.register(6.0, register(incarnation="2", control_port=5700))
        assert router.state() is MemberStatus.JOINING
        (endpoint,) = router.members.to_probe()
        router.members.answered(endpoint)
        assert (
            router.pools[Side.PREFILL].acquire(router.pools[Side.PREFILL].fewest()).endpoint.control_port
            == 5700
        )
        assert router.pools[Side.PREFILL].endpoints == [endpoint]

    asyncio.run(scenario())


def test_unreachable_engine_is_probed_until_it_answers(router: Fixture) -> None:
    router.join()
    endpoint = router.pools[Side.PREFILL].acquire(router.pools[Side.PREFILL].fewest()).endpoint
    router.members.failed(endpoint, "connection refused")
    assert router.state() is MemberStatus.UNREACHABLE
    assert not router.usable()
    router.members.register(1.0, register())
    assert not router.usable(), "its worker lives, its API server does not answer"
    assert router.members.to_probe() == [endpoint]
    router.members.answered(endpoint)
    assert router.usable()


def test_hanging_server_loses_the_requests_of_all_ranks_and_returns_when_it_answers(ranks: Fixture) -> None:
    async def scenario() -> None:
        pool = ranks.pools[Side.PREFILL]
        leases = [pool.acquire(pool.fewest()) for _ in range(2)]
        (endpoint,) = ranks.members.to_watch()

        async def wait(lease: Lease) -> None:
            async with lease.alive():
                await asyncio.Event().wait()

        waiting = [asyncio.create_task(wait(lease)) for lease in leases]
        await asyncio.sleep(0)
        ranks.members.hangs(endpoint, "no answer")
        for task in waiting:
            with pytest.raises(EngineLost):
                await asyncio.wait_for(task, 60)
        assert not ranks.usable()
        assert len(ranks.members.to_watch()) == 1, "something might still be waited for"
        for lease in leases:
            lease.release()
        assert ranks.members.to_watch() == []
        ranks.members.answered(endpoint)
        with pool.lease(pool.fewest()) as lease:
            async with lease.alive():
                pass

    asyncio.run(scenario())


def test_undrain_waits_for_the_word_of_an_engine_that_registers(router: Fixture) -> None:
    router.join()
    assert router.members.undrain("http://other:1") is None
    router.members.drain(URL, move=True)
    router.members.register(1.0, register())
    assert router.state() is MemberStatus.DRAINING, "the engine does not know yet"
    router.members.register(2.0, register(draining=True))
    assert router.members.undrain(URL) is True
    assert router.state() is MemberStatus.DRAINING, "its next REGISTER would say so again"
    router.members.register(3.0, register())
    assert router.state() is MemberStatus.READY
    (endpoint,) = router.pools[Side.PREFILL].endpoints
    assert not router.members.emptied(endpoint)
    assert router.members.undrain(URL) is False


def test_undrain_reaches_routers_that_did_not_receive_the_command(router: Fixture) -> None:
    router.join(draining=True)
    router.members.register(1.0, register())
    assert router.state() is MemberStatus.READY


def test_undrain_takes_back_a_drain_that_an_engine_has_not_reported(router: Fixture) -> None:
    router.join()
    router.members.drain(URL)
    assert router.members.undrain(URL) is False
    assert router.state() is MemberStatus.READY


def test_undrain_is_the_routers_own_matter_for_a_listed_engine() -> None:
    router = Fixture(decode=(URL,))
    router.members.drain(URL, move=True)
    assert router.members.undrain(URL) is False
    assert router.state(side=Side.DECODE) is MemberStatus.READY
    assert not router.members.emptied(Endpoint.parse(URL))


def test_the_last_decode_engine_is_known_until_another_one_takes_requests(router: Fixture) -> None:
    other: dict[str, Any] = {"engine_id": "d2", "url": "http://10.0.0.2:8200", "role": Role.DECODE}
    router.join(role=Role.DECODE)
    router.join(engine_id="p", url="http://10.0.0.3:8100")
    router.members.register(0.0, register(**other))
    assert router.members.last(URL) is Side.DECODE, "the other one is joining"
    assert router.members.last("http://10.0.0.3:8100") is None
    router.join(**other)
    assert router.members.last(URL) is None
    router.members.drain(other["url"])
    assert router.members.last(URL) is Side.DECODE
    router.members.drain(URL)
    assert router.members.last(URL) is None, "it drains already"


def test_an_engine_that_does_not_register_drains_until_it_is_back() -> None:
    router = Fixture(decode=(URL,))
    endpoint = router.pools[Side.DECODE].fewest()
    router.members.drain(URL, move=True)
    router.members.answered(endpoint)
    assert router.state(side=Side.DECODE) is MemberStatus.DRAINING
    assert router.members.to_watch() == [endpoint]
    router.members.failed(endpoint, "connection refused", gone=True)
    router.members.answered(endpoint)
    assert router.usable(Side.DECODE)
    assert not router.members.emptied(endpoint)


def test_one_look_without_an_answer_ends_no_drain() -> None:
    router = Fixture(decode=(URL,))
    endpoint = router.pools[Side.DECODE].fewest()
    router.members.drain(URL)
    for _ in range(3):
        router.members.failed(endpoint, "its /health answers 503")
        router.members.failed(endpoint, "no answer", missed=True)
        router.members.answered(endpoint)
        assert router.state(side=Side.DECODE) is MemberStatus.DRAINING
    for _ in range(2):
        router.members.failed(endpoint, "no answer", missed=True)
    router.members.answered(endpoint)
    assert router.state(side=Side.DECODE) is MemberStatus.READY


def test_drain_of_a_registered_engine_lasts_until_a_new_process_registers(router: Fixture) -> None:
    router.join()
    endpoint = router.pools[Side.PREFILL].fewest()
    router.members.drain(URL)
    assert router.members.to_watch() == []
    router.members.failed(endpoint, "connection reset")
    router.members.answered(endpoint)
    assert router.state() is MemberStatus.DRAINING


def test_listed_engines_are_used_without_a_registration() -> None:
    router = Fixture(prefill=(URL,), decode=("http://10.0.0.2:8100",))
    router.members.tick(0.0)
    router.members.tick(1000.0)
    assert router.usable(Side.PREFILL)
    assert router.usable(Side.DECODE)
    (prefill, _) = router.members.to_watch()
    router.members.failed(prefill, "refused")
    assert router.members.to_probe() == [prefill]


def test_a_listed_engine_that_registers_is_watched_and_stays_listed() -> None:
    router = Fixture(prefill=(f"{URL}@10.0.0.1:5600",))
    router.members.register(0.0, register())
    assert router.usable(), "it was in use all the time"
    assert router.members.to_watch() == []
    for now in (1.0, 2.0, 3.0, 4.0, 5.0):
        router.members.tick(now)
    assert router.state() is MemberStatus.UNREACHABLE
    (endpoint,) = router.members.to_probe()
    router.members.answered(endpoint)
    assert router.usable()


def test_no_more_engines_than_a_router_can_have(router: Fixture) -> None:
    for port in range(1, MAX_ENGINES + 1):
        router.members.register(0.0, register(url=f"http://h:{port}"))
    with pytest.raises(RefusedRegistrationError, match="engines already"):
        router.members.register(0.0, register(url="http://other:1"))
    router.members.register(1.0, register(url="http://h:1"))


@pytest.mark.parametrize("url", ["ftp://h:1", "http://h:1/path", "nonsense"])
def test_a_url_that_is_none_is_refused(router: Fixture, url: str) -> None:
    with pytest.raises(ValueError, match="address"):
        router.members.register(0.0, register(url=url))
    assert router.state() is None


# --- Data-parallel ranks: engines behind one API server


def rank(number: int, **changes: Any) -> dict[str, Any]:
    """Returns the fields with which a rank's core registers."""
    return {
        "engine_id": f"p_dp{number}",
        "incarnation": f"of rank {number}",
        "control_port": 5600 + number,
        "rank": number,
    } | changes


@pytest.fixture
def ranks() -> Fixture:
    """Returns a router with two ranks behind one API server."""
    router = Fixture()
    for number in range(2):
        router.members.register(0.0, register(**rank(number)))
    (endpoint,) = router.members.to_probe()
    router.members.answered(endpoint)
    return router


def test_ranks_take_turns_and_no_beat_of_one_costs_the_other_its_requests(ranks: Fixture) -> None:
    async def scenario() -> None:
        leases = [ranks.pools[Side.PREFILL].acquire(ranks.pools[Side.PREFILL].fewest()) for _ in range(4)]
        for now in (1.0, 2.0):
            for number in range(2):
                ranks.members.register(now, register(**rank(number)))
        for lease in leases:
            async with lease.alive():
                pass
        held = [(lease.endpoint.url, lease.endpoint.rank, lease.endpoint.control_port) for lease in leases]
        assert held == [(URL, 0, 5600), (URL, 1, 5601)] * 2
        assert ranks.members.outstanding(URL) == 4

    asyncio.run(scenario())


def test_ranks_are_distinguished_where_states_are_shown(ranks: Fixture) -> None:
    assert ranks.members.states()[Side.PREFILL] == {
        URL: MemberStatus.READY,
        f"{URL} rank 1": MemberStatus.READY,
    }


def test_an_api_server_that_does_not_answer_costs_all_its_ranks(ranks: Fixture) -> None:
    other = "http://10.0.0.2:8100"
    ranks.join(url=other, engine_id="other", incarnation="other")
    ranks.members.failed(Endpoint(URL, "10.0.0.1", 5601, rank=1), "connection refused")
    states = ranks.members.states()[Side.PREFILL]
    assert states == {
        URL: MemberStatus.UNREACHABLE,
        f"{URL} rank 1": MemberStatus.UNREACHABLE,
        other: MemberStatus.READY,
    }
    (endpoint,) = ranks.members.to_probe()
    ranks.members.answered(endpoint)
    assert set(ranks.members.states()[Side.PREFILL].values()) == {MemberStatus.READY}


def test_failure_of_a_replaced_rank_does_not_count_against_its_api_server(ranks: Fixture) -> None:
    gone = Endpoint(URL, "10.0.0.1", 5601, rank=1)
    ranks.join(6.0, **rank(1, incarnation="again", control_port=5701))
    ranks.members.failed(gone, "connection reset")
    assert set(ranks.members.states()[Side.PREFILL].values()) == {MemberStatus.READY}


def test_a_rank_that_falls_silent_is_lost_alone(ranks: Fixture) -> None:
    async def scenario() -> None:
        for now in (1.0, 2.0, 3.0, 4.0, 5.0):
            ranks.members.register(now, register(**rank(0)))
            ranks.members.tick(now)
        assert ranks.members.states()[Side.PREFILL] == {URL: MemberStatus.READY}

    asyncio.run(scenario())


def test_a_rank_leaves_alone(ranks: Fixture) -> None:
    ranks.members.leave(Leave("p_dp0", "of rank 0"))
    assert ranks.members.states()[Side.PREFILL] == {f"{URL} rank 1": MemberStatus.READY}


def test_a_drain_is_for_all_ranks_of_an_api_server(ranks: Fixture) -> None:
    lease = ranks.pools[Side.PREFILL].acquire(ranks.pools[Side.PREFILL].fewest())
    ranks.members.drain(URL)
    assert set(ranks.members.states()[Side.PREFILL].values()) == {MemberStatus.DRAINING}
    assert not ranks.usable()
    assert ranks.members.outstanding(URL) == 1
    lease.release()
    assert ranks.members.outstanding(URL) == 0


RIVAL = {"engine_id": "q", "incarnation": "2", "control_port": 5700}


def test_a_copied_api_url_costs_the_engine_that_has_it_nothing(router: Fixture) -> None:
    async def scenario() -> None:
        router.join(0.0)
        lease = router.pools[Side.PREFILL].acquire(router.pools[Side.PREFILL].fewest())
        for now in (1.0, 2.0, 3.0):
            with pytest.raises(RefusedRegistrationError, match=r"both register as rank 0 of .* api_url"):
                router.members.register(now, register(**RIVAL))
            router.members.register(now, register())
        router.members.leave(Leave("q", "2"))
        async with lease.alive():
            assert router.state() is MemberStatus.READY

    asyncio.run(scenario())


def test_an_engine_whose_place_was_taken_in_its_silence_has_it_back_behind_its_rival(router: Fixture) -> None:
    router.join(0.0)
    router.join(6.0, **RIVAL)
    assert router.pools[Side.PREFILL].fewest().control_port == 5700
    for now in (7.0, 8.0):
        with pytest.raises(RefusedRegistrationError, match="both register"):
            router.members.register(now, register())
        router.members.register(now, register(**RIVAL))
    router.members.leave(Leave("q", "2"))
    router.join(9.0)
    assert router.pools[Side.PREFILL].fewest().control_port == 5600


def test_a_process_that_starts_again_at_its_address_is_used_at_once(router: Fixture) -> None:
    router.join(0.0)
    router.join(0.5, incarnation="2")
    assert router.state() is MemberStatus.READY


def test_a_url_that_is_listed_twice_has_two_ranks() -> None:
    router = Fixture(prefill=(f"{URL}@10.0.0.1:5600", f"{URL}@10.0.0.1:5602"), decode=(URL, URL))
    prefill = [
        router.pools[Side.PREFILL].acquire(router.pools[Side.PREFILL].fewest()).endpoint for _ in range(2)
    ]
    assert prefill == [Endpoint(URL, "10.0.0.1", 5600, 0), Endpoint(URL, "10.0.0.1", 5602, 1)]
    decode = [
        router.pools[Side.DECODE].acquire(router.pools[Side.DECODE].fewest()).endpoint for _ in range(2)
    ]
    assert decode == prefill, "on both sides it is one engine, and its control address is the named one"
    assert len(router.members.to_watch()) == 1


def test_a_listed_rank_is_joined_by_one_that_registers() -> None:
    router = Fixture(prefill=(f"{URL}@10.0.0.1:5600",))
    for number in range(2):
        router.join(1.0, **rank(number))
    assert [
        router.pools[Side.PREFILL].acquire(router.pools[Side.PREFILL].fewest()).endpoint.rank
        for _ in range(4)
    ] == [0, 1, 0, 1]


# --- Another list of the command line


def relist(router: Fixture, prefill: tuple[str, ...] = (), decode: tuple[str, ...] = ()) -> None:
    listed = {
        Side.PREFILL: [Endpoint.parse(url) for url in prefill],
        Side.DECODE: [Endpoint.parse(url) for url in decode],
    }
    router.members.relist(listed)


def test_members_use_an_engine_that_is_listed_anew_once_it_answers() -> None:
    router = Fixture(decode=("http://d1:1",))
    relist(router, decode=("http://d1:1", "http://d2:1"))
    assert router.state("http://d1:1", Side.DECODE) is MemberStatus.READY
    assert router.state("http://d2:1", Side.DECODE) is MemberStatus.JOINING
    (endpoint,) = router.members.to_probe()
    router.members.answered(endpoint)
    assert router.state("http://d2:1", Side.DECODE) is MemberStatus.READY


@pytest.mark.anyio
async def test_members_keep_requests_of_an_engine_that_is_no_longer_listed() -> None:
    router = Fixture(decode=("http://d1:1", "http://d2:1"))
    pool = router.pools[Side.DECODE]
    with pool.lease(Endpoint.parse("http://d1:1")) as lease:
        async with lease.alive():
            relist(router, decode=("http://d2:1",))
            await asyncio.sleep(0)  # EngineLost would end the block here
        router.members.served(0.0, lease.endpoint)
    assert pool.endpoints == [Endpoint.parse("http://d2:1")]


def test_members_replace_a_listed_engine_whose_control_address_or_side_changes() -> None:
    router = Fixture(prefill=("http://p:1@c:1",), decode=("http://d:1",))
    relist(router, prefill=("http://p:1@c:2", "http://d:1"), decode=("http://d:1",))
    assert router.pools[Side.PREFILL].endpoints == [
        Endpoint.parse("http://p:1@c:2"),
        Endpoint.parse("http://d:1"),
    ]
    assert router.state("http://p:1") is MemberStatus.JOINING
    assert router.state("http://d:1", Side.DECODE) is MemberStatus.JOINING
    relist(router, prefill=("http://p:1@c:2",), decode=("http://d:1", "http://d:1"))
    assert router.state("http://d:1 rank 1", Side.DECODE) is MemberStatus.JOINING
    assert router.state("http://d:1") is None


def test_members_keep_an_engine_that_registers_whatever_is_listed() -> None:
    router = Fixture(prefill=(URL,))
    router.join()
    relist(router)
    assert router.state() is MemberStatus.READY
    router.members.tick(0.0)
    router.members.tick(2.0)
    router.members.tick(4.0)
    router.members.tick(6.0)  # silent for longer than `dead`, and not listed any more
    assert router.state() is None


def test_models_of_many_engines_are_read_in_parts(router: Fixture) -> None:
    """Each part opens its connections at the same moment. Every list is read once in 10 seconds."""
    for number in range(400):
        router.join(0.0, engine_id=f"p{number}", url=f"http://10.0.0.1:{1000 + number}")
    turns = [len(router.members.to_learn(0.5 * number)) for number in range(20)]
    assert turns == [40] * 10 + [0] * 10
    assert len(router.members.to_learn(10.0)) == 40


def test_models_of_new_engines_are_read_first(router: Fixture) -> None:
    for number in range(17):
        router.join(0.0, engine_id=f"p{number}", url=f"http://h:{number}")
        asked = [endpoint.url for endpoint in router.members.to_learn(0.0 if number < 16 else 10.0)]
    assert "http://h:16" in asked


def test_models_of_few_engines_are_read_at_once(router: Fixture) -> None:
    for number in range(16):
        router.join(0.0, engine_id=f"p{number}", url=f"http://10.0.0.1:{1000 + number}")
    assert len(router.members.to_learn(0.0)) == 16
