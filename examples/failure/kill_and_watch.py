"""Kills a prefill engine and then a decode engine (kill -9) under load, and shows what the clients notice."""

import tempfile
import time
from pathlib import Path

from kv_connector.lab.clients import Clients
from kv_connector.lab.cluster import HOST, EngineProcess, LocalCluster, Role, engine_states
from kv_connector.lab.free_ports import free_ports
from kv_connector.lab.model import make_llama
from kv_connector.lab.process import leave_on_signals


def show(cluster: LocalCluster) -> None:
    (port,) = free_ports(1)

    def start(name: str, role: Role) -> EngineProcess:
        return cluster.start_engine(name, role=role, routers=[f"{HOST}:{port}"])

    router = cluster.start_router("router", registration=port)
    prefill = [start(f"prefill-{n}", "kv_producer") for n in (1, 2)]
    decode = [start(f"decode-{n}", "kv_consumer") for n in (1, 2)]
    cluster.wait_ready()
    cluster.wait_joined(router, *prefill, *decode)

    with Clients(router, count=4) as clients:
        for victim in (prefill[0], decode[0]):
            clients.wait_answered(8)
            failures = len(clients.failures)
            killed = time.monotonic()
            victim.kill()
            clients.wait_answered(8)
            print(
                f"{victim.name} killed: 8 more answers after {time.monotonic() - killed:.1f} s, "
                f"{len(clients.failures) - failures} of 4 clients saw a failure, "
                f"the router reports {engine_states(router).get(victim.url, 'gone')}",
                flush=True,
            )
            again = cluster.restart(victim)
            cluster.wait_ready(again)
            cluster.wait_joined(router, again)
            print(f"{victim.name} started again: joined", flush=True)
        clients.wait_answered(8)
    print(f"{clients.answered} requests answered, {len(clients.failures)} failed")
    for words in clients.failures:
        print(f"  {words[:200]}")


if __name__ == "__main__":
    with leave_on_signals(), tempfile.TemporaryDirectory() as directory:
        model = make_llama(Path(directory, "model"))
        with LocalCluster(Path(directory), model) as cluster:
            show(cluster)
