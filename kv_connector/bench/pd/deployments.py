"""The compared deployments: one engine alone, and pairs of engines through three connectors."""

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from kv_connector.lab.cluster import HOST, EngineProcess, LocalCluster
from kv_connector.lab.free_ports import free_ports
from kv_connector.lab.process import Process, stop


@dataclass(frozen=True)
class RunningDeployment:
    """A deployment that serves completions at `url`."""

    url: str
    engines: tuple[EngineProcess, ...]
    """The prefill engine before the decode engine."""
    router: Process | None = None
    """The router, if it uses CPU while idle."""

    @property
    def processes(self) -> tuple[Process, ...]:
        return self.engines if self.router is None else (*self.engines, self.router)


@dataclass(frozen=True)
class Deployment:
    name: str
    """Value of --deployments."""
    label: str
    start: Callable[[LocalCluster, ExitStack], RunningDeployment]
    """Starts its processes and returns at once.

    Processes that the cluster does not own end with the stack.
    """
    module: str | None = None
    """Python module that the deployment needs and that is no dependency of this project."""


def _alone(cluster: LocalCluster, _: ExitStack) -> RunningDeployment:
    engine = cluster.start_engine("alone")
    return RunningDeployment(engine.url, (engine,))


def _ours(cluster: LocalCluster, _: ExitStack) -> RunningDeployment:
    prefill = cluster.start_engine("ours-prefill", role="kv_producer")
    decode = cluster.start_engine("ours-decode", role="kv_consumer")
    return RunningDeployment(
        cluster.start_router("ours-router", prefill=[prefill], decode=[decode]), (prefill, decode)
    )


def _nixl(cluster: LocalCluster, _: ExitStack) -> RunningDeployment:
    """Goes through our router, prefill before decode, which is NIXL's flow."""
    engines = []
    for name, role in (("nixl-prefill", "kv_producer"), ("nixl-decode", "kv_consumer")):
        (port,) = free_ports(1)
        transfer = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
        environment = {"VLLM_NIXL_SIDE_CHANNEL_HOST": HOST, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
        engines.append(_engine(cluster, name, transfer, environment))
    prefill, decode = engines
    url = cluster.start_router("nixl-router", prefill=[prefill], decode=[decode], dispatch="serial")
    return RunningDeployment(url, (prefill, decode))


def _mooncake(cluster: LocalCluster, stack: ExitStack) -> RunningDeployment:
    bootstrap, port = free_ports(2)
    engines = []
    for name, role in (("mooncake-prefill", "kv_producer"), ("mooncake-decode", "kv_consumer")):
        transfer = {
            "kv_connector": "MooncakeConnector",
            "kv_connector_module_path": "kv_connector.bench.pd.mooncake_cpu",
            "kv_role": role,
            "kv_buffer_device": "cpu",
            "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
        }
        engines.append(_engine(cluster, name, transfer, {"VLLM_MOONCAKE_BOOTSTRAP_PORT": str(bootstrap)}))
    prefill, decode = engines
    command = [sys.executable, "-m", "kv_connector.bench.pd.mooncake_proxy", "--port", str(port)]
    command += ["--prefill", prefill.url, "--decode", decode.url, "--bootstrap", f"http://{HOST}:{bootstrap}"]
    proxy = Process("mooncake-proxy", command, environment={}, log=cluster.directory / "mooncake-proxy.log")
    stack.callback(stop, [proxy])
    return RunningDeployment(f"http://{HOST}:{port}", (prefill, decode), proxy)


def _engine(
    cluster: LocalCluster, name: str, transfer: Mapping[str, Any], environment: Mapping[str, str]
) -> EngineProcess:
    """Starts an engine with another project's connector."""
    arguments = (*cluster.settings.arguments, "--kv-transfer-config", json.dumps(transfer))
    settings = replace(cluster.settings, arguments=arguments, environment=environment)
    return cluster.start_engine(name, settings=settings)


DEPLOYMENTS = (
    Deployment("alone", "one engine", _alone),
    Deployment("ours", "WriteImmConnector", _ours),
    Deployment("nixl", "NixlConnector", _nixl, module="nixl._api"),
    Deployment("mooncake", "MooncakeConnector", _mooncake, module="mooncake.engine"),
)
