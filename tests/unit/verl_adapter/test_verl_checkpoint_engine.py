"""The checkpoint engine for verl, called as verl's manager calls it, with a stand-in for verl's base class.

tests/fleet/test_verl_interface.py compares the calls with verl's own class.
"""

from __future__ import annotations

import asyncio
import pickle
import sys
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import pytest
from weight_streams import BUCKET_BYTES, HOST, PATIENCE, InThread, Named, drawn, same


class Registry:
    """A stand-in for verl's CheckpointEngineRegistry."""

    engines: dict[str, type[Any]] = {}  # noqa: RUF012

    @staticmethod
    def register(backend: str) -> Any:
        def wrapper(cls: type[Any]) -> type[Any]:
            Registry.engines[backend] = cls
            return cls

        return wrapper


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module that verl imports, on a node with the address 127.0.0.1."""
    base: Any = ModuleType("verl.checkpoint_engine")
    base.CheckpointEngine, base.CheckpointEngineRegistry = object, Registry
    util: Any = ModuleType("ray.util")
    util.get_node_ip_address = lambda: HOST
    stand_ins = {"verl": ModuleType("verl"), base.__name__: base, "ray": ModuleType("ray"), "ray.util": util}
    for name, module in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, module)
    names = ("kv_connector.verl.internals", "kv_connector.verl.checkpoint_engine")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    import kv_connector.verl.checkpoint_engine as module

    yield module
    for name in names:
        sys.modules.pop(name, None)


class Workers:
    """The checkpoint engines of all workers. Each call runs on all of them at once, as in Ray's actors."""

    def __init__(self, adapter: Any, trainers: int, rollouts: int, **options: Any) -> None:
        self.kind = Registry.engines["write_imm"]
        options = {"bucket_size": BUCKET_BYTES, "providers": ["tcp"], "timeout": PATIENCE, **options}
        self.trainers = [self.kind(is_master=rank == 0, **options) for rank in range(trainers)]
        self.rollouts = [self.kind(**options) for _ in range(rollouts)]
        del adapter

    def join(self) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Connects all, as CheckpointEngineManager.build_process_group() does."""
        # Ray pickles what workers return.
        metadata = [pickle.loads(pickle.dumps(one.prepare())) for one in (*self.trainers, *self.rollouts)]
        actor, rollout = self.kind.build_topology(len(self.trainers), len(self.rollouts), metadata)
        calls = []
        for workers, arguments in ((self.trainers, actor), (self.rollouts, rollout)):
            assert {len(values) for values in arguments.values()} == {len(workers)}
            for number, worker in enumerate(workers):
                own = {name: values[number] for name, values in arguments.items()}
                calls.append(InThread(partial(worker.init_process_group, **own)))
        for call in calls:
            call.result()
        return actor, rollout

    def update(self, step: int) -> list[list[Named]]:
        """Updates all, as CheckpointEngineManager.update_weights() does. Returns each worker's weights."""
        self.join()

        async def collect(worker: Any) -> list[Named]:
            return [(name, one.clone()) async for name, one in worker.receive_weights(global_steps=step)]

        sending = [
            InThread(partial(asyncio.run, one.send_weights(drawn(step), global_steps=step)))
            for one in self.trainers
        ]
        receiving = [InThread(partial(asyncio.run, collect(one))) for one in self.rollouts]
        for thread in sending:
            thread.result()
        found = [thread.result() for thread in receiving]
        self.finalize()
        return found

    def finalize(self) -> None:
        for worker in (*self.trainers, *self.rollouts):
            worker.finalize()


@pytest.mark.parametrize(("trainers", "rollouts"), [(1, 1), (3, 2), (2, 3)])
def test_every_rollout_worker_gets_all_weights_in_several_updates(
    adapter: Any, trainers: int, rollouts: int
) -> None:
    workers = Workers(adapter, trainers, rollouts)
    for step in range(2):
        for found in workers.update(step):
            same(found, drawn(step))


def test_rollout_workers_are_divided_among_trainers_first_by_number_and_by_host(adapter: Any) -> None:
    hosts = ["a", "b"]
    trainers = [
        adapter.PreparedWorker(host, adapter.Address(host, 1), adapter.ClusterKey.generate())
        for host in hosts
    ]
    rollouts = [adapter.PreparedWorker(host) for host in ("b", "b", "a", "b")]
    actor, rollout = adapter.WriteImmCheckpointEngine.build_topology(2, 4, [*trainers, *rollouts])
    assert [sender.rank for sender in rollout["sender"]] == [1, 0, 0, 1]
    assert actor["receivers"] == [
        {1: "rollout worker 1 at b", 2: "rollout worker 2 at a"},
        {0: "rollout worker 0 at b", 3: "rollout worker 3 at b"},
    ]


def test_a_failed_update_leaves_nothing_behind(adapter: Any) -> None:
    """verl calls finalize() after a success only. The next prepare() ends what is left."""
    workers = Workers(adapter, 2, 2)
    workers.join()

    async def first(worker: Any) -> None:
        weights = worker.receive_weights()
        await anext(weights)
        await weights.aclose()
        assert worker._receiver._watched._fds == (), "its end is left to a later turn of the loop"

    receiving = [InThread(partial(asyncio.run, first(one))) for one in workers.rollouts]
    sending = [InThread(partial(asyncio.run, one.send_weights(drawn(0)))) for one in workers.trainers]
    for thread in receiving:
        thread.result()
    for rank, thread in enumerate(sending):
        with pytest.raises(RuntimeError, match=f"rollout worker {rank} at {HOST} ended the update"):
            thread.result()
    for found in workers.update(1):
        same(found, drawn(1))


def test_finalize_frees_the_buffers_and_may_be_repeated(adapter: Any) -> None:
    workers = Workers(adapter, 1, 1)
    workers.finalize()
    workers.join()
    workers.finalize()
    workers.finalize()
    for worker in (*workers.trainers, *workers.rollouts):
        assert (worker._sender, worker._receiver, worker._sockets) == (None, None, None)


def test_a_string_of_providers_is_refused(adapter: Any) -> None:
    with pytest.raises(ValueError, match=r"providers is 'verbs'\. Give a list of lanes"):
        Workers(adapter, 1, 0, providers="verbs")
