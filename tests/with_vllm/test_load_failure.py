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
    Deployment,
    Hold,
    Refused,
    assert_quiescent,
    decode_params,
    engine_settings,
    prefill_params,
    prompt,
    wait_live,
    wait_logged,
)

from kv_connector.lab.cluster import Engine, LocalCluster

pytestmark = pytest.mark.anyio

LONG = 1500
# An engine that gets no CPU time on a busy machine must not count as dead.
BUSY = {"connect": 30.0, "suspect": 15.0, "dead": 30.0}


@pytest.fixture(scope="module")
def recomputing(
    deployment: Deployment,
    model_directories: dict[str, Path],
    interpreter: tuple[str, ...],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Engine]:
    """A decode engine beside the deployment's, with the policy `recompute`. The deployment's policy is
    `fail`."""
    directory = tmp_path_factory.mktemp("recompute")
    with LocalCluster(directory, model_directories["llama"], engine_settings(blocks=120)) as cluster:
        cluster.interpreter = interpreter
        extra = {"providers": ["host", "tcp"], "data_host": DATA_HOST, "timeouts": BUSY}
        engine = cluster.start_engine(
            "recompute", role="kv_consumer", extra=extra, on_load_failure="recompute"
        )
        cluster.wait_ready()
        yield engine


@pytest.mark.parametrize("deployment", ["llama"], indirect=True)
async def test_a_failed_load_is_recomputed(
    deployment: Deployment, recomputing: Engine, client: Client, tmp_path: Path
) -> None:
    """P gives up in the middle of a prefill. One D fails only that request, the other computes it itself."""
    for decode in (recomputing, deployment.decode):
        one, other = prompt(f"load failure {decode.name}", LONG), prompt(f"beside {decode.name}", 300)
        expected = await client.complete(deployment.plain.url, one, 8)
        beside = await client.complete(deployment.plain.url, other, 8)
        hold = Hold(client, deployment.prefill, tmp_path / decode.name)
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
            with pytest.raises(Refused) as refused:
                await decoding
            assert refused.value.status >= 500
        # The log names the peer, the lane and the reason. No other request is affected.
        await wait_logged(
            decode, f"transfer {transfer} of request .* from .* over host: cancelled: prefill_aborted"
        )
        assert await client.complete(decode.url, other, 8) == beside
        await assert_quiescent(client, deployment.prefill, decode)
