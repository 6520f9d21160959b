"""Serial dispatch: the decode engine gets a request after the prefill engine has computed the prompt."""

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack

from kv_connector.router.engines.members import Side
from kv_connector.router.engines.pool import Lease
from kv_connector.router.failure import failure
from kv_connector.router.requests.answers import Answer
from kv_connector.router.streams.attempt import Attempt, Components


async def answer_serially(
    parts: Components,
    attempt: Attempt,
    stack: AsyncExitStack,
    lease_partner: Callable[[], Awaitable[Lease]],
    alone: Callable[[Lease], Awaitable[Answer]],
) -> Answer:
    """Waits until the decode engine's answer begins; Failure if there is none.

    ``stack`` ends the answer. ``lease_partner`` leases a decode engine that loads what the prefill engine has
    computed. ``alone`` requests the answer of a decode engine whose weights do not fit.
    """
    completion, call, transfer_id = attempt.completion, attempt.call, attempt.transfer_id
    parts.spans.name_transfer(transfer_id)
    placement = attempt.placement
    prefilling = parts.pools[Side.PREFILL].lease(attempt.prefill, placement.work, prompt=placement.prompt)
    with ExitStack() as loading:
        with prefilling as prefill, attempt.hold(parts.holds, prefill):
            body = attempt.prefill_body(serial=True)
            computed = await parts.calls.prefill(prefill, body, call)
            parts.caches.prefilled(prefill, computed, placement.prefix)
            if params := computed.params:
                # Before the lease ends: the engine keeps the prompt without a gap.
                loading.enter_context(attempt.hold(parts.holds, prefill))
        if not params:
            # Without this error, the prompt would silently be computed twice.
            raise failure(
                502,
                "api_error",
                f"the prefill engine {prefill.endpoint} answered without kv_transfer_params. Start it with "
                "--kv-transfer-config and the kv_role kv_producer or kv_both",
            )
        decode = await lease_partner()
        if computed.tokens is not None:
            decode.counted(computed.tokens)
        fits = parts.fits(prefill.endpoint, decode.endpoint)
        if fits:
            parts.caches.sent(transfer_id, decode)
            ids = attempt.begin_decode(parts, decode)
            body = completion.decode_body(params, ids=ids)
            answer = await parts.calls.load(transfer_id, prefill.endpoint, decode, body, call, stack)
            parts.caches.began(decode, placement)
    if not fits:
        # The decode engines that fit have failed, or are draining, since the placement.
        parts.holds.release(transfer_id, prefill.endpoint, call)
        return await alone(decode)
    call.running.cached = computed.cached
    return answer
