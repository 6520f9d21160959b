"""A case's engines: P, D, a router, and the single engine whose tokens are right."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import no_torchvision
from cases import Case, Side
from deployment import HOST_TIER, TIMEOUTS, engine_settings
from kinds import KINDS

from kv_connector.lab.cluster import HOST, EngineProcess, EngineSettings, LocalCluster, Role
from kv_connector.lab.free_ports import free_ports

MAX_MODEL_LEN = 1024
PLENTY = 500  # blocks

FETCHED = "vllm:external_prefix_cache_hits_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"


class Models:
    """Directories of models by their names in kinds.py. Each is made at its first use."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __getitem__(self, name: str) -> Path:
        directory = self._directory / name
        if not directory.exists():
            directory.mkdir()
            KINDS[name](directory)
        return directory


@dataclass(frozen=True)
class Ask:
    """A request, without its way to P and D."""

    prompt: tuple[int, ...]
    length: int
    body: Mapping[str, Any] = field(default_factory=dict)

    def key(self) -> tuple[object, ...]:
        return (self.prompt, self.length, json.dumps(self.body, sort_keys=True))


@dataclass(frozen=True)
class Right:
    """A single engine's answer to an Ask."""

    choices: list[tuple[list[int], str]]
    """Output tokens of each choice, and its finish reason."""
    accepted: float
    """Output tokens that came from the drafter."""


@dataclass
class Known:
    """Answers of single engines so far, by their configuration."""

    answers: dict[tuple[object, ...], dict[tuple[object, ...], Right]] = field(default_factory=dict)

    def of(self, case: Case) -> dict[tuple[object, ...], Right]:
        return self.answers.setdefault(alone_key(case), {})


def alone_key(case: Case) -> tuple[object, ...]:
    side = alone(case)
    return (case.model, side.flags, side.chunk, case.dtype, case.caching, *sorted(case.environment.items()))


def alone(case: Case) -> Side:
    return case.decode if case.alone is None else replace(case.decode, flags=case.alone)


@dataclass(frozen=True)
class Site:
    prefill: EngineProcess
    decode: EngineProcess
    router: str
    alone: EngineProcess | None


class CaseCluster:
    """Starts the engines of a case. All end with the cluster."""

    def __init__(self, cluster: LocalCluster, case: Case, models: Models) -> None:
        self._cluster = cluster
        self._case = case
        self._models = models
        self._path = no_torchvision.install(cluster.directory / "plugin") if case.torchvision else ""
        cluster.environment = dict(case.environment)

    def start(self, *, with_alone: bool, encoders: Iterable[EngineProcess] = ()) -> Site:
        """Starts the engines in parallel, and waits until all serve."""
        case = self._case
        prefill = self.start_engine("prefill", case.prefill, "kv_producer")
        decode = self.start_engine("decode", case.decode, "kv_consumer", blocks=case.pool or PLENTY)
        single = self.start_engine("alone", alone(case), None) if with_alone else None
        router = self._cluster.start_router("router", prefill=[prefill], decode=[decode], encoders=encoders)
        self._cluster.wait_ready()
        return Site(prefill, decode, router, single)

    def start_engine(
        self, name: str, side: Side, role: Role | None, *, blocks: int = PLENTY
    ) -> EngineProcess:
        role = role and (side.role or role)
        extra: dict[str, Any] = {"timeouts": TIMEOUTS}
        (port,) = free_ports(1)
        if self._case.connector == "MultiConnector" and role is not None:
            extra = self._two_connectors(name, role, extra | {"control_host": HOST, "control_port": port})
        return self._cluster.start_engine(
            name,
            role=role,
            extra=extra,
            control_port=port,
            connector=self._case.connector,
            settings=self._settings(side, blocks),
        )

    def _two_connectors(self, name: str, role: str, ours: dict[str, Any]) -> dict[str, Any]:
        """Returns a MultiConnector's settings: this connector, and a tier of each engine."""
        tier: dict[str, Any] = HOST_TIER
        if self._case.tier == "ExampleConnector":
            tier = {"shared_storage_path": str(self._cluster.directory / f"{name}-saved")}
        connectors = [
            {"kv_connector": "WriteImmConnector", "kv_role": role, "kv_connector_extra_config": ours},
            {"kv_connector": self._case.tier, "kv_role": "kv_both", "kv_connector_extra_config": tier},
        ]
        return {"connectors": connectors[::-1] if self._case.tier_first else connectors}

    def _settings(self, side: Side, blocks: int) -> EngineSettings:
        words = [self._resolve(word) for word in side.words()]
        settings = engine_settings_of(side, ["--dtype", self._case.dtype, *words], blocks)
        path = ":".join(filter(None, [settings.environment["PYTHONPATH"], self._path]))
        return replace(
            settings,
            prefix_caching=self._case.caching,
            environment={**settings.environment, "PYTHONPATH": path},
        )

    def _resolve(self, word: str) -> str:
        return re.sub(r"@([\w-]+)", lambda name: str(self._models[name[1]]), word)


def engine_settings_of(side: Side, words: Iterable[str], blocks: int = PLENTY) -> EngineSettings:
    return replace(
        engine_settings(*words, blocks=blocks),
        max_model_len=MAX_MODEL_LEN,
        max_batched_tokens=side.chunk,
        max_seqs=8,
        block_size=side.block,
    )
