"""Pages that do not arrive: a reported failure per request, by vLLM's kv_load_failure_policy, and no wrong
token."""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from deployment import (
    DATA_HOST,
    Client,
    ModelDeployment,
    RefusedCall,
    StepHold,
    assert_quiescent,
    decode_params,
    engine_settings,
    prefill_params,
    prompt,
    wait_live,
    wait_logged,
)

from kv_connector.lab.cluster import EngineProcess, LocalCluster

pytestmark = pytest.mark.anyio

LONG = 1500
# An engine that gets no CPU time on a busy machine must not count as dead.
BUSY = {"connect": 30.0, "suspect": 15.0, "dead": 30.0}


@pytest.fixture(scope="module")
def recomputing(
    deployment: ModelDeployment,
    model_directories: dict[str, Path],
    interpreter: tuple[str, ...],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[EngineProcess]:
    """A decode engine beside the deployment's, which verifies pages and has the policy `recompute`. The
    deployment's policy is `fail`."""
    directory = tmp_path_factory.mktemp("recompute")
    with LocalCluster(directory, model_directories["llama"], engine_settings(blocks=120)) as cluster:
        cluster.interpreter = interpreter
        extra = {
            "providers": ["host", "tcp"],
            "data_host": DATA_HOST,
            "timeouts": BUSY,
            "verify_pages": True,
        }
        engine = cluster.start_engine(
            "recompute", role="kv_consumer", extra=extra, on_load_failure="recompute"
        )
        cluster.wait_ready()
        yield engine


@pytest.mark.parametrize("deployment", ["llama"], indirect=True)
async def test_a_failed_load_is_recomputed(
    deployment: ModelDeployment, recomputing: EngineProcess, client: Client, tmp_path: Path
) -> None:
    """P gives up in the middle of a prefill. One D fails only that request, the other computes it itself."""
    for decode in (recomputing, deployment.decode):
        one, other = prompt(f"load failure {decode.name}", LONG), prompt(f"beside {decode.name}", 300)
        expected = await client.complete(deployment.plain.url, one, 8)
        beside = await client.complete(deployment.plain.url, other, 8)
        hold = StepHold(client, deployment.prefill, tmp_path / decode.name)
        (tmp_path / decode.name).mkdir()
        await hold.arm(2 * deployment.shape.layers + deployment.shape.layers // 2)
        transfer = f"load failure {decode.name}"
        decoding = asyncio.create_task(
            client.complete(
                decode.url, one, 8, kv_transfer_params=decode_params(transfer, deployment.prefill)
            )
        )
        await wait_live(client, decode)  # D has reserved
        prefilling = asyncio.create_task(
            client.complete(deployment.prefill.url, one, 1, kv_transfer_params=prefill_params(transfer))
        )
        try:
            await hold.reached()
            logged = len(deployment.prefill.log.read_bytes())
            prefilling.cancel()
            with suppress(asyncio.CancelledError):
                await prefilling
            await wait_logged(deployment.prefill, "Request .* aborted", since=logged)
        finally:
            hold.release()
        if decode is recomputing:
            assert await decoding == expected
        else:
            with pytest.raises(RefusedCall) as refused:
                await decoding
            assert refused.value.status >= 500
        # The log names the peer, the lane and the reason. No other request is affected.
        await wait_logged(
            decode, f"transfer {transfer} of request .* from .* over host: cancelled: prefill_aborted"
        )
        assert await client.complete(decode.url, other, 8) == beside
        await assert_quiescent(client, deployment.prefill, decode)


@pytest.mark.parametrize("deployment", ["llama"], indirect=True)
async def test_a_corrupt_page_is_found_and_its_prompt_recomputed(
    deployment: ModelDeployment, recomputing: EngineProcess, client: Client
) -> None:
    """One bit of one landed page is flipped. The answer is the right one, and the log names the page."""
    pages = deployment.shape.pages(LONG)
    for name, corrupt in (("sound", 0), ("corrupt", 1)):
        one, transfer = prompt(f"verified {name}", LONG), f"verified {name}"
        before = await client.stats(recomputing)
        if corrupt:
            await client.probe(recomputing, "probe_flip_bit")
        expected, answer, _ = await asyncio.gather(
            client.complete(deployment.plain.url, one, 8),
            client.complete(
                recomputing.url, one, 8, kv_transfer_params=decode_params(transfer, deployment.prefill)
            ),
            client.complete(deployment.prefill.url, one, 1, kv_transfer_params=prefill_params(transfer)),
        )
        assert answer == expected
        after = await client.stats(recomputing)
        assert after["checked_pages"] - before["checked_pages"] >= pages
        assert after["checked_corrupt"] - before["checked_corrupt"] == corrupt
        assert after["checked_unverified"] == 0
        assert after["received_completed"] - before.get("received_completed", 0) == 1 - corrupt
    await wait_logged(
        recomputing,
        r"CORRUPT PAGE: transfer verified corrupt of request .* from .* over host to .*: 1 of \d+ pages "
        r"differ from the prefill engine's: layer .*, block \d+ \(tokens \d+ to \d+\)",
    )
    await assert_quiescent(client, deployment.prefill, recomputing)
