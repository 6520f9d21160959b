"""Engines join a router and leave it under load, without a failed request."""

import subprocess
import tempfile
from pathlib import Path

from kv_connector.lab.clients import Clients
from kv_connector.lab.cluster import HOST, EngineProcess, EngineSettings, LocalCluster, Role, engine_states
from kv_connector.lab.free_ports import free_ports
from kv_connector.lab.model import make_llama
from kv_connector.lab.process import leave_on_signals


def show(cluster: LocalCluster) -> None:
    (port,) = free_ports(1)
    registration = f"{HOST}:{port}"

    def start(name: str, role: Role) -> EngineProcess:
        return cluster.start_engine(name, role=role, routers=[registration])

    # The router is started without engines. Each engine knows the router's address and registers there.
    router = cluster.start_router("router", registration=port)
    old = [start("prefill-1", "kv_producer"), start("decode-1", "kv_consumer")]
    cluster.wait_ready()
    say("two engines have joined", router)

    with Clients(router) as clients:
        clients.wait_answered(4)
        new = [start("prefill-2", "kv_producer"), start("decode-2", "kv_consumer")]
        cluster.wait_ready()
        cluster.wait_joined(router, *new)
        say("two more have joined", router)

        clients.wait_answered(4)
        for engine in old:
            # The engine gets no new requests, and the command returns when its requests have ended.
            subprocess.run(["kv-connector", "drain", engine.url, "--router", registration], check=True)
            cluster.stop(engine)
        say("the first two have been drained and stopped", router)

        clients.wait_answered(4)
    print(f"{clients.answered} requests answered, {len(clients.failures)} failed")
    if clients.failures:
        raise SystemExit(clients.failures[0])


def say(what: str, router: str) -> None:
    print(f"{what}:", *(f"{url} {state}" for url, state in engine_states(router).items()), flush=True)


if __name__ == "__main__":
    with leave_on_signals(), tempfile.TemporaryDirectory() as directory:
        model = make_llama(Path(directory, "model"))
        # Without it vLLM kills its worker right behind SIGTERM, and the engine does not leave its router.
        settings = EngineSettings(arguments=("--shutdown-timeout", "5"))
        with LocalCluster(Path(directory), model, settings) as cluster:
            show(cluster)
