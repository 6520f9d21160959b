"""SglangCluster: SGLang servers and their router as processes on this machine, over loopback, on CPUs."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kv_connector.lab.free_ports import free_ports
from kv_connector.lab.process import Process, ProcessGroup, starting
from kv_connector.lab.served import Served

Role = Literal["prefill", "decode"]

HOST = "127.0.0.1"


@dataclass(frozen=True)
class ServerSettings:
    """Settings that all servers of a cluster share, in SGLang's own terms."""

    page_size: int = 1
    max_total_tokens: int = 8192
    max_running_requests: int = 16
    chunked_prefill_size: int = 4096
    """Tokens of one step. A longer prompt is prefilled in chunks of this size."""
    context_length: int = 4096
    backend: str = "write_imm"
    arguments: tuple[str, ...] = ()
    """Further arguments of SGLang's server, passed unchanged."""
    environment: Mapping[str, str] = field(default_factory=dict)


class SglangServer(Served):
    """One SGLang server with its scheduler processes."""

    def __init__(
        self,
        name: str,
        command: tuple[str, ...],
        *,
        environment: Mapping[str, str],
        log: Path,
        port: int,
        bootstrap_port: int | None,
    ) -> None:
        super().__init__(name, command, environment=environment, log=log)
        self.command = command
        self.environment = dict(environment)
        self.port = port
        self.bootstrap_port = bootstrap_port
        """Port of a prefill server's bootstrap service."""

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"


class SglangCluster(ProcessGroup):
    """Starts servers and routers. Logs go to `directory`, one file per process."""

    def __init__(self, directory: Path, model: Path, settings: ServerSettings | None = None) -> None:
        super().__init__()
        self.directory = directory
        self.model = model
        self.settings = settings or ServerSettings()
        directory.mkdir(parents=True, exist_ok=True)

    def start_server(
        self,
        name: str,
        *,
        role: Role | None = None,
        ranks: int = 1,
        settings: ServerSettings | None = None,
    ) -> SglangServer:
        """Starts a server and returns at once.

        `role` None: a server that prefills and decodes by itself. `ranks`: the number of tensor-parallel
        ranks.
        """
        settings = settings or self.settings
        words = {
            "device": "cpu",
            "attention-backend": "torch_native",
            "dtype": "float32",
            "tp-size": ranks,
        }
        # SGLang's overlapping loop needs CUDA's events on a prefill server.
        flags = ("--disable-overlap-schedule", *settings.arguments)
        environment = {**_environment(ranks), **settings.environment}
        return self._launch(name, role, settings, words, flags, environment)

    def _launch(
        self,
        name: str,
        role: Role | None,
        settings: ServerSettings,
        words: Mapping[str, object],
        flags: tuple[str, ...],
        environment: Mapping[str, str],
    ) -> SglangServer:
        """Starts a server with the arguments that servers of every device share.

        `words` are further arguments with a value, without their dashes.
        """
        port, bootstrap, rendezvous = free_ports(3)
        arguments: dict[str, object] = {
            "model-path": self.model,
            "host": HOST,
            "port": port,
            # SGLang would draw it among the ports of the other servers, which may not listen yet.
            "nccl-port": rendezvous,
            "random-seed": 0,
            "page-size": settings.page_size,
            "max-total-tokens": settings.max_total_tokens,
            "max-running-requests": settings.max_running_requests,
            "chunked-prefill-size": settings.chunked_prefill_size,
            "context-length": settings.context_length,
            **words,
        }
        if role is not None:
            arguments["disaggregation-mode"] = role
            arguments["disaggregation-transfer-backend"] = settings.backend
        if role == "prefill":
            arguments["disaggregation-bootstrap-port"] = bootstrap
        if role == "decode":
            # The default copies pages into memory that CUDA pins.
            arguments["disaggregation-decode-retraction-backup"] = "cpu_tensor"
        command = [sys.executable, "-m", "sglang.launch_server", "--skip-server-warmup", *flags]
        command += [word for key, value in arguments.items() for word in (f"--{key}", str(value))]
        return self._start(name, tuple(command), environment, port, bootstrap if role == "prefill" else None)

    def restart(self, server: SglangServer) -> SglangServer:
        """Starts a server again as it was, at its ports and with its log, and returns at once.

        Remaining processes of the old one are killed first.
        """
        server.kill()
        return self._start(
            server.name, server.command, server.environment, server.port, server.bootstrap_port
        )

    def start_router(
        self,
        name: str,
        *,
        prefill: Iterable[SglangServer],
        decode: Iterable[SglangServer],
        mini: bool = False,
    ) -> str:
        """Starts SGLang's router over these servers and returns its URL at once.

        `mini`: the small router in Python.
        """
        (port,) = free_ports(1)
        command = [sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation"]
        command += ["--host", HOST, "--port", str(port)]
        if mini:
            command.append("--mini-lb")
        else:
            command += ["--policy", "round_robin", "--prometheus-port", str(free_ports(1)[0])]
        for server in prefill:
            command += ["--prefill", server.url, str(server.bootstrap_port)]
        for server in decode:
            command += ["--decode", server.url]
        url = f"http://{HOST}:{port}"
        with starting():
            router = Process(name, command, environment={}, log=self.directory / f"{name}.log")
            # The larger router is healthy before it has reached a server. Requests get a 503 until then.
            self._adopt(router, f"{url}/{'health' if mini else 'readiness'}")
        return url

    def _start(
        self,
        name: str,
        command: tuple[str, ...],
        environment: Mapping[str, str],
        port: int,
        bootstrap_port: int | None,
    ) -> SglangServer:
        with starting():
            server = SglangServer(
                name,
                command,
                environment=environment,
                log=self.directory / f"{name}.log",
                port=port,
                bootstrap_port=bootstrap_port,
            )
            self._adopt(server, f"{server.url}/health")
        return server


def _environment(ranks: int) -> dict[str, str]:
    variables = {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_HOST_IP": HOST,
        "OMP_NUM_THREADS": "1",
        # No process accesses the internet.
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
    }
    if ranks > 1:  # otherwise SGLang looks for as many NUMA nodes
        variables["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(core) for core in range(ranks))
    return variables
