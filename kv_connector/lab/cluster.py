"""LocalCluster: vLLM engines and a router as processes on this machine, over loopback, on CPUs."""

import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kv_connector.lab.free_ports import free_ports
from kv_connector.lab.process import POLL_SECONDS, Process, ProcessGroup, StartError, starting
from kv_connector.lab.served import Served

Role = Literal["kv_producer", "kv_consumer", "kv_both"]
Dispatch = Literal["concurrent", "serial"]

HOST = "127.0.0.1"
MODEL_NAME = "model"


@dataclass(frozen=True)
class EngineSettings:
    """Settings that all engines of a cluster share, in vLLM's own terms."""

    max_model_len: int = 4096
    max_batched_tokens: int = 1024
    """Tokens of one step. A longer prompt is prefilled in chunks of this size."""
    max_seqs: int = 16
    block_size: int = 32
    """Tokens per block; a multiple of 32 on CPUs."""
    kv_cache_bytes: int = 256 << 20
    prefix_caching: bool = True
    threads: int = 1
    """OpenMP threads of an engine."""
    arguments: tuple[str, ...] = ()
    """Further arguments of vLLM's API server, passed unchanged."""
    environment: Mapping[str, str] = field(default_factory=dict)


class EngineProcess(Served):
    """One vLLM API server with its engine core and workers."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        log: Path,
        port: int,
        control_port: int | None,
        host: str = HOST,
    ) -> None:
        super().__init__(name, command, environment=environment, log=log)
        self.command = tuple(command)
        self.environment = dict(environment)
        self.host = host
        self.port = port
        self.control_port = control_port

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def endpoint(self) -> str:
        """Value of the router's --prefill: the HTTP address, and the connector's control address."""
        return self.url if self.control_port is None else f"{self.url}@{self.host}:{self.control_port}"


class LocalCluster(ProcessGroup):
    """Starts engines and routers, and ends them all when its `with` block is left in any way.

    Logs go to `directory`, one file per process. Processes start side by side: start all, then call
    `wait_ready`.
    """

    def __init__(self, directory: Path, model: Path, settings: EngineSettings | None = None) -> None:
        super().__init__()
        self.directory = directory
        self.model = model
        self.settings = settings or EngineSettings()
        self.environment: dict[str, str] = {}
        """Additional variables of every process that is started from now on."""
        self.interpreter: tuple[str, ...] = (sys.executable,)
        """Command that runs vLLM's modules."""
        self.otlp_traces_endpoint: str | None = None
        """Target of the spans of engines and routers that are started from now on."""
        self.routers: dict[str, Process] = {}
        """Started routers by URL."""
        directory.mkdir(parents=True, exist_ok=True)

    def start_engine(
        self,
        name: str,
        *,
        role: Role | None = None,
        extra: Mapping[str, Any] | None = None,
        settings: EngineSettings | None = None,
        port: int | None = None,
        control_port: int | None = None,
        connector: str = "WriteImmConnector",
        routers: Iterable[str] = (),
        namespace: tuple[str, str] | None = None,
        on_load_failure: Literal["fail", "recompute"] = "fail",
    ) -> EngineProcess:
        """Starts an engine and returns at once.

        `role` None is a plain engine without a connector. `extra` goes into kv_connector_extra_config beside
        control_host and control_port. Ports that are not given are picked; give them to restart an engine at
        its old addresses. `routers`: addresses at which routers take registrations. `namespace`: a network
        namespace to run in, and this engine's address there.
        """
        host = HOST if namespace is None else namespace[1]
        settings = settings or self.settings
        http, control = free_ports(2)
        port = port or http
        command = [
            *([] if namespace is None else ["ip", "netns", "exec", namespace[0]]),
            *self.interpreter,
            "-m",
            "vllm.entrypoints.openai.api_server",
            *self._arguments(settings, host, port),
        ]
        if role is None:
            control_port = None
        else:
            control_port = control_port or control
            addresses = list(routers)
            joining = {"routers": addresses, "api_url": f"http://{host}:{port}"} if addresses else {}
            transfer = {
                "kv_connector": connector,
                "kv_role": role,
                "kv_connector_extra_config": {
                    "control_host": host,
                    "control_port": control_port,
                    **joining,
                    **(extra or {}),
                },
                "kv_load_failure_policy": on_load_failure,
            }
            command += ["--kv-transfer-config", json.dumps(transfer)]
        command += self._tracing()
        with starting():
            engine = EngineProcess(
                name,
                command,
                environment={**engine_environment(settings), "VLLM_HOST_IP": host, **self.environment},
                log=self.directory / f"{name}.log",
                port=port,
                control_port=control_port,
                host=host,
            )
            self._adopt(engine, f"{engine.url}/health")
        return engine

    def restart(self, engine: EngineProcess) -> EngineProcess:
        """Starts an engine again as it was, at its ports and with its log, and returns at once.

        Remaining processes of the old one are killed first.
        """
        engine.kill()
        with starting():
            again = EngineProcess(
                engine.name,
                engine.command,
                environment=engine.environment,
                log=engine.log,
                port=engine.port,
                control_port=engine.control_port,
                host=engine.host,
            )
            self._adopt(again, f"{again.url}/health")
        return again

    def start_router(
        self,
        name: str,
        *,
        prefill: Iterable[EngineProcess] = (),
        decode: Iterable[EngineProcess] = (),
        encoders: Iterable[EngineProcess] = (),
        dispatch: Dispatch = "concurrent",
        registration: int | None = None,
        port: int | None = None,
        host: str = HOST,
    ) -> str:
        """Starts a router over these engines and returns its URL at once.

        `registration`: the port at which further engines register. `port`: its HTTP port, to restart a router
        at its old address.
        """
        port = port or free_ports(1)[0]
        command = [
            sys.executable,
            "-m",
            "kv_connector.cli.main",
            "router",
            "--host",
            host,
            "--port",
            str(port),
        ]
        for engine in prefill:
            command += ["--prefill", engine.endpoint]
        for engine in decode:
            command += ["--decode", engine.url]
        for engine in encoders:
            command += ["--encoder", engine.url]
        if dispatch == "serial":
            command.append("--serial")
        command += self._tracing()
        if registration is not None:
            command += ["--registration", f"{host}:{registration}"]
        url = f"http://{host}:{port}"
        with starting():
            router = Process(name, command, environment=self.environment, log=self.directory / f"{name}.log")
            self._adopt(router, f"{url}/health")
        self.routers[url] = router
        return url

    def wait_joined(self, router: str, *engines: EngineProcess, seconds: float = 30.0) -> None:
        """Blocks until the router at this URL sends these engines requests. StartError: it does not."""
        deadline = time.monotonic() + seconds
        while True:
            states = engine_states(router)
            missing = [engine.name for engine in engines if states.get(engine.url) != "ready"]
            if not missing:
                return
            if time.monotonic() > deadline:
                raise StartError(f"{', '.join(missing)} did not join {router}, which knows {states}")
            time.sleep(POLL_SECONDS)

    def _tracing(self) -> list[str]:
        """Returns the tracing options, which vLLM and our router share."""
        endpoint = self.otlp_traces_endpoint
        return [] if endpoint is None else ["--otlp-traces-endpoint", endpoint]

    def _arguments(self, settings: EngineSettings, host: str, port: int) -> list[str]:
        arguments = {
            "model": self.model,
            "served-model-name": MODEL_NAME,
            "host": host,
            "port": port,
            "dtype": "float32",
            "seed": 0,
            "max-model-len": settings.max_model_len,
            "max-num-batched-tokens": settings.max_batched_tokens,
            "max-num-seqs": settings.max_seqs,
            "block-size": settings.block_size,
            "kv-cache-memory-bytes": settings.kv_cache_bytes,
        }
        caching = "--enable-prefix-caching" if settings.prefix_caching else "--no-enable-prefix-caching"
        words = [word for key, value in arguments.items() for word in (f"--{key}", str(value))]
        return [*words, "--enforce-eager", caching, *settings.arguments]


def engine_states(router: str) -> dict[str, str]:
    """Returns the status of each engine that a router knows ("ready", "draining", ...), by URL."""
    try:
        with urllib.request.urlopen(f"{router}/health", timeout=10) as response:
            sides = json.load(response)
    except urllib.error.HTTPError as error:  # 503: a role has no ready engine
        sides = json.load(error)
    return {url: state for side in ("prefill", "decode") for url, state in sides[side].items()}


def engine_environment(settings: EngineSettings) -> dict[str, str]:
    return {
        # Several engines share the cores, so none may pin its threads.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(settings.threads),
        # No process accesses the internet.
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        **settings.environment,
    }
