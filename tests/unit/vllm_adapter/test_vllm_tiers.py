"""WriteImmConnector beside vLLM's OffloadingConnector in a MultiConnector, under vLLM's real scheduler.

Both connectors' scheduler sides are real. The workers are pretended: pages are numbers of blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deployment import HOST_TIER
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    MultiKVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm_stage import BLOCK, FULL, PARAMS_OF_D, PARAMS_OF_P, SLIDING, Stage, model, prompt, vllm_config

from kv_connector.agent.commands import ReleaseTransfer
from kv_connector.protocol.requests import DecodeRequest
from kv_connector.vllm.connector import WriteImmConnector
from kv_connector.vllm.metadata import News, StepMetadata
from kv_connector.vllm.scheduling.scheduler_side import SchedulerSide

__all__ = ["model"]

BLOCKS = 5
"""Full blocks of the prompt."""
TEXT = prompt(BLOCKS * BLOCK + 9)
ORDERS = pytest.mark.parametrize("tier_first", [False, True], ids=["tier-last", "tier-first"])


def two_connectors(config: VllmConfig, *, tier_first: bool) -> VllmConfig:
    """Puts the configuration's connector beside a tier."""
    ours = config.kv_transfer_config
    assert ours is not None
    connectors = [
        {
            "kv_connector": ours.kv_connector,
            "kv_connector_module_path": ours.kv_connector_module_path,
            "kv_role": ours.kv_role,
            "kv_buffer_device": "cpu",
            "kv_connector_extra_config": ours.kv_connector_extra_config,
        },
        {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": HOST_TIER,
        },
    ]
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role=ours.kv_role,
        kv_load_failure_policy=ours.kv_load_failure_policy,
        engine_id=ours.engine_id,
        kv_connector_extra_config={"connectors": connectors[::-1] if tier_first else connectors},
    )
    return config


class Tiered(Stage):
    """A scheduler with both connectors. The tier's stores end with the step that follows."""

    def __init__(self, config: VllmConfig, *specs: Any, tier_first: bool, blocks: int = 100) -> None:
        self._ours, self._tier = (1, 0) if tier_first else (0, 1)
        self.loads: dict[int, Any] = {}
        """The tier's load jobs of the last step."""
        self.flushed: set[int] = set()
        """Store jobs that the tier had to complete before the last step."""
        self.stores: dict[int, Any] = {}
        """The tier's store jobs that have not ended."""
        self._ending: list[int] = []
        super().__init__(two_connectors(config, tier_first=tier_first), specs or (FULL,), blocks)

    def step_metadata(self, metadata: Any) -> StepMetadata:
        ours, tier = (metadata.metadata[index] for index in (self._ours, self._tier))
        self._ending = list(self.stores)
        self.loads, self.flushed = tier.load_jobs, set(tier.jobs_to_flush or ())
        self.stores.update(tier.store_jobs)
        return super().step_metadata(ours)

    def worker_metadata(self, news: News) -> Any:
        ended = [*self._ending, *self.loads]
        for job in self._ending:
            del self.stores[job]
        tier = OffloadingWorkerMetadata(completed_jobs=dict.fromkeys(ended, 1)) if ended else None
        both: list[Any] = [None, None]
        both[self._ours], both[self._tier] = super().worker_metadata(news), tier
        return MultiKVConnectorWorkerMetadata(tuple(both)) if any(both) else None

    @property
    def side(self) -> SchedulerSide:
        connector = self.scheduler.connector
        assert isinstance(connector, MultiConnector)
        ours = connector.sub_connectors[self._ours]
        assert isinstance(ours, WriteImmConnector)
        assert ours.scheduler is not None
        return ours.scheduler

    def finish(self) -> None:
        """Runs until no request and no store is left."""
        for _ in range(60):
            self.step()
        self.assert_idle()
        assert not self.stores

    def fill_tier(self, text: list[int]) -> None:
        """Computes the prompt, which the tier stores. The engine's own prefix cache is empty afterwards."""
        self.add("fills", text)
        self.finish()
        assert self.scheduler.reset_prefix_cache()


MakeTiered = Callable[..., Tiered]


@pytest.fixture
def tiered(model: Path) -> MakeTiered:
    def make(role: str, *specs: Any, tier_first: bool, blocks: int = 100, **options: Any) -> Tiered:
        return Tiered(vllm_config(model, role, **options), *specs, tier_first=tier_first, blocks=blocks)

    return make


@ORDERS
def test_layout_names_of_both_connectors_agree(model: Path, tier_first: bool) -> None:
    """vLLM's MultiConnector refuses two names of one layout."""
    config = two_connectors(vllm_config(model, "kv_both"), tier_first=tier_first)
    assert MultiConnector.get_required_kvcache_layout(config) == "LBHNC"


@ORDERS
@pytest.mark.parametrize("specs", [(FULL,), (FULL, SLIDING)], ids=["full", "sliding"])
def test_decode_engine_loads_a_fresh_prompt_from_the_prefill_engine(
    tiered: MakeTiered, specs: tuple[Any, ...], tier_first: bool
) -> None:
    decode = tiered("kv_consumer", *specs, tier_first=tier_first)
    decode.add("d", TEXT, dict(PARAMS_OF_D), max_tokens=3)
    (asked,) = decode.step().commands
    assert isinstance(asked, DecodeRequest)
    assert (asked.first_token, len(asked.groups[0].blocks)) == (0, BLOCKS + 1)
    assert not decode.loads
    decode.step(received=["d"])
    decode.finish()


@ORDERS
def test_decode_engines_first_connector_with_tokens_loads_them(tiered: MakeTiered, tier_first: bool) -> None:
    """The tier has the prompt's full blocks, and the prefill engine has all."""
    decode = tiered("kv_consumer", tier_first=tier_first)
    decode.fill_tier(TEXT)
    decode.add("d", TEXT, dict(PARAMS_OF_D), max_tokens=3)
    (command,) = decode.step().commands
    if tier_first:
        assert isinstance(command, ReleaseTransfer), "the prefill engine must not hold the prompt"
        (job,) = decode.loads.values()
        assert len(job.dst_spec.block_ids) == BLOCKS
    else:
        assert isinstance(command, DecodeRequest)
        assert (command.first_token, len(command.groups[0].blocks)) == (0, BLOCKS + 1)
        assert not decode.loads
    decode.step(received=["d"])
    output, _ = decode.schedule()
    assert output.num_scheduled_tokens == {"d": 9 if tier_first else 1}
    decode.update(output)
    decode.finish()


def test_first_token_lost_to_the_tier_is_logged_once(
    tiered: MakeTiered, caplog: pytest.LogCaptureFixture
) -> None:
    """The client may have the prefill engine's token, and the decode engine may sample another one."""
    logger = logging.getLogger("kv_connector")
    logger.addHandler(caplog.handler)
    try:
        decode = tiered("kv_consumer", tier_first=True)
        texts = {"a": TEXT, "b": prompt(len(TEXT), seed=2)}
        for text in texts.values():
            decode.fill_tier(text)
        for name, text in texts.items():
            decode.add(name, text, PARAMS_OF_D | {"transfer_id": name, "early_token": True}, max_tokens=3)
        decode.step()
        decode.step(received=["a", "b"])
        decode.finish()
    finally:
        logger.removeHandler(caplog.handler)
    assert [record.args for record in caplog.records if "loads the prompt" in record.msg] == [("a", "a")]


@ORDERS
def test_decode_engines_tier_stores_pushed_blocks(tiered: MakeTiered, tier_first: bool) -> None:
    decode = tiered("kv_consumer", tier_first=tier_first)
    decode.add("d", TEXT, dict(PARAMS_OF_D), max_tokens=3)
    decode.step()
    decode.step(received=["d"])
    decode.finish()
    assert decode.scheduler.reset_prefix_cache()
    decode.add("own", TEXT)
    decode.step()
    (job,) = decode.loads.values()
    assert len(job.dst_spec.block_ids) == BLOCKS
    decode.step(received=["own"])
    decode.finish()


@ORDERS
def test_prefill_engine_sends_what_its_tier_loads_and_reports_it_as_cached(
    tiered: MakeTiered, tier_first: bool
) -> None:
    prefill = tiered("kv_producer", tier_first=tier_first)
    prefill.fill_tier(TEXT)
    prefill.add("p", TEXT, dict(PARAMS_OF_P))
    assert not prefill.step().new_pages, "the tier's load has not ended"
    assert len(prefill.loads) == 1
    prefill.step(received=["p"])
    output, metadata = prefill.schedule()
    assert output.num_scheduled_tokens == {"p": 9}
    (pages,) = metadata.new_pages
    assert (pages.last, pages.groups[0].first) == (True, 0)
    assert list(pages.groups[0].blocks) == prefill.tables("p")[0]
    told = prefill.update(output)["p"]
    assert told["remote_prefill_cached_tokens"] == BLOCKS * BLOCK
    stats = prefill.outputs[-1].prefill_stats
    assert (stats.num_cached_tokens, stats.num_external_cached_tokens) == (BLOCKS * BLOCK, BLOCKS * BLOCK)
    prefill.step(sent=["p"])
    prefill.finish()


def test_reset_during_the_tiers_load_frees_no_block_that_the_tier_writes(tiered: MakeTiered) -> None:
    """The decode engine's request has parameters of a transfer, but the tier loads its blocks."""
    decode = tiered("kv_consumer", tier_first=True)
    decode.fill_tier(TEXT)
    decode.add("d", TEXT, dict(PARAMS_OF_D), max_tokens=3)
    decode.step()
    assert len(decode.loads) == 1
    held = decode.blocks_in_use
    assert held == BLOCKS
    assert not decode.scheduler.reset_prefix_cache(), "as without a transfer"
    assert decode.blocks_in_use == held
    decode.step(received=["d"])
    decode.finish()


@ORDERS
@pytest.mark.parametrize("phase", ["loads", "runs"])
def test_blocks_are_free_after_a_client_leaves(tiered: MakeTiered, phase: str, tier_first: bool) -> None:
    decode = tiered("kv_consumer", tier_first=tier_first)
    decode.fill_tier(TEXT)
    decode.add("d", TEXT, dict(PARAMS_OF_D), max_tokens=30)
    decode.step()
    if phase == "runs":
        decode.step(received=["d"])
        decode.step()
    decode.abort("d")
    decode.step()
    if phase == "loads":
        decode.step(received=["d"])
    decode.finish()


@ORDERS
def test_tier_ends_its_stores_before_pages_land_in_their_blocks(tiered: MakeTiered, tier_first: bool) -> None:
    """A pool without room gives a finished request's blocks to the next load, while the tier stores them."""
    decode = tiered("kv_consumer", tier_first=tier_first, blocks=BLOCKS + 2)
    decode.add("first", TEXT, dict(PARAMS_OF_D, transfer_id="1"))
    decode.step()
    decode.step(received=["first"])
    decode.step()
    assert len(decode.stores) == 1
    ((job, store),) = decode.stores.items()
    decode.add("second", prompt(len(TEXT), seed=2), dict(PARAMS_OF_D, transfer_id="2"))
    _, metadata = decode.schedule()
    (asked,) = (command for command in metadata.commands if isinstance(command, DecodeRequest))
    assert set(store.src_spec.block_ids) & set(asked.groups[0].blocks)
    assert decode.flushed == {job}
