"""vLLM's real Scheduler and block pool with a pretend model, for tests of the connector's scheduler half."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from protocol_setup import layout, worker
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kv_connector.lab.model import make_llama
from kv_connector.protocol.actions import Address, PrefixRequested
from kv_connector.vllm.connector import WriteImmConnector
from kv_connector.vllm.kept_cache import SaltedHasher, keep
from kv_connector.vllm.metadata import DescribedRank, News, StepMetadata
from kv_connector.vllm.scheduling.scheduler_side import SchedulerSide

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups, get_kv_cache_groups  # 0.33
except ImportError:
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups  # 0.32

__all__ = [
    "ADDRESS",
    "BLOCK",
    "FULL",
    "PARAMS_OF_D",
    "PARAMS_OF_P",
    "SHAPE",
    "SLIDING",
    "WINDOW",
    "MakeStage",
    "Stage",
    "get_kv_cache_config_from_groups",
    "get_kv_cache_groups",
    "model",
    "prompt",
    "stage",
    "vllm_config",
]

ADDRESS = Address("10.0.0.1", 5600)
PARAMS_OF_P = {"do_remote_decode": True, "transfer_id": "t"}
PARAMS_OF_D = {
    "do_remote_prefill": True,
    "transfer_id": "t",
    "remote_host": ADDRESS.host,
    "remote_port": ADDRESS.port,
}

BLOCK = 32
WINDOW = 64
SHAPE: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
FULL = FullAttentionSpec(**SHAPE)
SLIDING = SlidingWindowSpec(**SHAPE, sliding_window=WINDOW)


def vllm_config(
    model: Path,
    role: str,
    *,
    budget: int = 256,
    policy: str = "fail",
    extra: dict[str, Any] | None = None,
    drafter: str | None = None,
) -> VllmConfig:
    """Returns an engine's configuration with prefill chunks of ``budget`` tokens. ``drafter``: the method by
    which the same model drafts three tokens."""
    return EngineArgs(
        model=str(model),
        enforce_eager=True,
        dtype="float32",
        max_model_len=4096,
        max_num_batched_tokens=budget,
        max_num_seqs=8,
        block_size=BLOCK,
        enable_prefix_caching=True,
        speculative_config=(
            {"method": drafter, "model": str(model), "num_speculative_tokens": 3} if drafter else None
        ),
        kv_transfer_config=KVTransferConfig(
            kv_connector="WriteImmConnector",
            kv_connector_module_path="kv_connector.vllm.connector",
            kv_role=role,  # type: ignore[arg-type]
            kv_buffer_device="cpu",
            kv_load_failure_policy=policy,  # type: ignore[arg-type]
            engine_id="engine",
            kv_connector_extra_config={"control_host": "127.0.0.1", **(extra or {})},
        ),
    ).create_engine_config()


def kv_cache_config(specs: Iterable[KVCacheSpec], blocks: int) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"model.layers.{i}.attn"], spec) for i, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)


class Stage:
    """One engine's scheduler. ``step`` runs one engine step with the reports of workers that the test
    gives."""

    def __init__(
        self,
        config: VllmConfig,
        specs: Iterable[KVCacheSpec],
        blocks: int = 100,
        scheduler: type[Scheduler] = Scheduler,
    ) -> None:
        self.outputs: list[EngineCoreOutput] = []
        """Outputs to clients, in order."""
        cache = kv_cache_config(specs, blocks)
        config.cache_config.num_gpu_blocks = blocks
        block_size, hash_block_size = resolve_kv_cache_block_sizes(cache, config)
        self.scheduler = scheduler(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_size,
            hash_block_size=hash_block_size,
            log_stats=True,
        )
        assert self.scheduler.connector is not None
        rank = DescribedRank(worker(layout(), ADDRESS))
        self.scheduler.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): rank})
        hash_function = get_hash_fn_by_name("sha256")
        init_none_hash(hash_function)
        self._hasher: Any = get_request_block_hasher(hash_block_size, hash_function)
        self._pool = self.scheduler.kv_cache_manager.block_pool
        self._free = self._pool.get_num_free_blocks()

    def add(
        self,
        request_id: str,
        prompt: list[int],
        params: dict[str, Any] | None = None,
        max_tokens: int = 1,
        sampling: dict[str, Any] | None = None,
        **more: Any,
    ) -> Request:
        extra = {"kv_transfer_params": params} if params is not None else None
        wanted = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra, **(sampling or {}))
        request = Request(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling_params=wanted,
            pooling_params=None,
            block_hasher=self._hasher,
            **more,
        )
        self.scheduler.add_request(request)
        return request

    def keep_cache(self, version: str) -> None:
        """Does what the engine core does after an update that keeps the KV cache."""
        core = SimpleNamespace(
            scheduler=self.scheduler,
            request_block_hasher=self._hasher,
            reset_encoder_cache=self.scheduler.reset_encoder_cache,
        )
        keep(core, version)
        self._hasher = core.request_block_hasher

    def cached(self, tokens: list[int], version: str | None) -> list[list[int | None]]:
        """Returns the blocks that a new request with these tokens finds in the cache, by KV cache group.

        ``version``: of ``keep_cache``, with which the request is hashed. None: no update has kept the cache.
        A block is None where a sliding window needs none.
        """
        plain = self._hasher.hasher if isinstance(self._hasher, SaltedHasher) else self._hasher
        request = Request(
            request_id="next",
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            block_hasher=plain if version is None else SaltedHasher(plain, version),
        )
        find = self.scheduler.kv_cache_manager.coordinator.find_longest_cache_hit
        found = find(request.block_hashes, request.num_tokens)[0]
        return [[None if block.is_null else block.block_id for block in group] for group in found]

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def schedule(self) -> tuple[SchedulerOutput, StepMetadata]:
        output = self.scheduler.schedule()
        return output, self.step_metadata(output.kv_connector_metadata)

    def step_metadata(self, metadata: Any) -> StepMetadata:
        """Returns this connector's part of a step's metadata."""
        assert isinstance(metadata, StepMetadata)
        return metadata

    def worker_metadata(self, news: News) -> Any:
        """Returns the workers' metadata with the news of this connector's workers."""
        return None if news == News() else news

    def update(
        self,
        output: SchedulerOutput,
        *,
        sent: Iterable[str] = (),
        reserved: Iterable[str] = (),
        received: Iterable[str] = (),
        failed: Iterable[str] = (),
        sampled: Mapping[str, int] | None = None,
        discarded: Iterable[str] = (),
        requested: Iterable[PrefixRequested] = (),
        due: Iterable[str] = (),
        answers: Mapping[str, int] | None = None,
        arrived: Mapping[str, float] | None = None,
    ) -> dict[str, Any]:
        """Runs a step. The model samples token 7 for each request whose tokens are all computed. Returns the
        kv_transfer_params of the requests that finished."""
        ids = list(output.num_scheduled_tokens)
        requests = self.scheduler.requests
        news = News(
            set(reserved),
            dict(sampled or {}),
            set(discarded),
            list(requested),
            set(due),
            dict(answers or {}),
            dict(arrived or {}),
        )
        tokens = [[7] if requests[i].num_computed_tokens >= requests[i].num_tokens else [] for i in ids]
        outputs = self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
                sampled_token_ids=tokens,
                kv_connector_output=KVConnectorOutput(
                    finished_sending=set(sent),
                    finished_recving=set(received),
                    failed_recving=set(failed),
                    kv_connector_worker_meta=self.worker_metadata(news),
                ),
            ),
        )
        told = [output for core in outputs.values() for output in core.outputs]
        self.outputs += told
        return {
            output.request_id: output.kv_transfer_params
            for output in told
            if output.finish_reason is not None
        }

    def said(self, request_id: str) -> list[int]:
        """Returns the request's output so far."""
        return [
            token
            for output in self.outputs
            if output.request_id == request_id
            for token in output.new_token_ids
        ]

    def step(self, **reports: Any) -> StepMetadata:
        output, metadata = self.schedule()
        self.update(output, **reports)
        return metadata

    def tables(self, request_id: str) -> tuple[list[int], ...]:
        return self.scheduler.kv_cache_manager.get_block_ids(request_id)

    @property
    def side(self) -> SchedulerSide:
        connector = self.scheduler.connector
        assert isinstance(connector, WriteImmConnector)
        assert connector.scheduler is not None
        return connector.scheduler

    @property
    def blocks_in_use(self) -> int:
        return self._free - self._pool.get_num_free_blocks()

    def assert_idle(self) -> None:
        """Checks that no request is left, every block is free, and the connector tracks nothing."""
        assert not self.scheduler.has_requests()
        assert not self.scheduler.requests
        assert self.blocks_in_use == 0
        side = self.side
        assert not side.has_unsent_commands()
        assert len(side._prefill) == len(side._decode) == len(side._borrower) == len(side._lender) == 0
        assert not side._borrower._by_transfer
        assert not side._prefill._transfers
        assert not side._decode._transfers


MakeStage = Callable[..., Stage]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"), layers=1, hidden=64, intermediate=64)


@pytest.fixture
def stage(model: Path) -> MakeStage:
    def make(role: str, *specs: Any, blocks: int = 100, **options: Any) -> Stage:
        return Stage(vllm_config(model, role, **options), specs or (FULL,), blocks)

    return make


def prompt(tokens: int, seed: int = 1) -> list[int]:
    return [(token * 31 + seed) % 300 for token in range(tokens)]
