"""CacheRecords: what requests show about the engines' prefix caches, whichever policy places them."""

from collections.abc import Callable, Mapping

from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.members import Side
from kv_connector.router.engines.pool import Pool
from kv_connector.router.engines.prompt import TokenSizes
from kv_connector.router.engines.workload import Workload
from kv_connector.router.placement.policy import Hits, Placement
from kv_connector.router.requests.answers import Computed
from kv_connector.router.requests.transcript import Said

Count = Callable[[Side, int, int], None]
"""Counts the hits of a prompt whose engine has reported them: side, predicted tokens, actual tokens."""


def _count_nothing(side: Side, predicted: int, actual: int) -> None:
    pass


class CacheRecords:
    """Records in the engines' prefix caches what is computed and generated.

    Used from the event loop's thread only.
    """

    def __init__(
        self,
        pools: Mapping[Side, Pool],
        sizes: TokenSizes | None = None,
        count: Count = _count_nothing,
    ) -> None:
        self._pools = pools
        self.sizes = sizes or TokenSizes()
        self._count = count

    def sent(self, placement: Placement) -> None:
        """Notes that the placement's engines have the request. A decision need not wait for this.

        A second call for the same placement does nothing.
        """
        prompt = placement.prompt
        if prompt is None or placement.hits:
            return
        tokens = placement.tokens or self.sizes.tokens(prompt)
        for side, engine in ((Side.PREFILL, placement.prefill), (Side.DECODE, placement.decode)):
            workload = None if engine is None else self._pools[side].workload(engine)
            if workload is not None:
                cache = workload.cache
                hit = prompt.tokens_of(cache.cached(prompt), tokens)
                placement.hits[side] = Hits(workload, hit, tokens, cache.confirmed(prompt))
        for hits in placement.hits.values():
            hits.workload.cache.prompt_computed(prompt, _room(hits.workload))

    def prompt_computed(self, placement: Placement, report: Computed) -> None:
        """Takes a prefill engine's report on a prompt that it has computed."""
        self.sent(placement)
        self._reported(Side.PREFILL, placement, report.tokens, report.cached)

    def answered(self, placement: Placement, engine: Endpoint, said: Said) -> None:
        """Notes that the decode engine has given its whole answer.

        The engine has the KV of prompt and answer. ``engine``: differs from the placement's if the stream
        moved.
        """
        if placement.prompt is None:
            return
        self.sent(placement)
        if placement.prefill is None:
            # Of a prompt that came from a prefill engine, a decode engine counts all tokens as cached.
            self._reported(Side.DECODE, placement, said.prompt_tokens, said.cached_tokens)
        workload = self._pools[Side.DECODE].workload(engine)
        sent_to = placement.hits.get(Side.DECODE)
        if workload is None or (
            engine == placement.decode and (sent_to is None or workload is not sent_to.workload)
        ):
            return  # another process is in the engine's place by now
        answer = said.answer if placement.prompt.tokens is None else said.ids
        if answer:
            workload.cache.prompt_computed(placement.prompt.followed_by(answer), _room(workload))

    def _reported(self, side: Side, placement: Placement, tokens: int | None, cached: int | None) -> None:
        prompt = placement.prompt
        if prompt is None or prompt.pictures or tokens is None:
            return
        self.sizes.learn(prompt, tokens)
        hits = placement.hits.get(side)
        if cached is None or hits is None:
            return
        hits.workload.cache.corrected(prompt, cached, tokens, hits.confirmed)
        self._count(side, hits.tokens * tokens // hits.of if hits.of else 0, cached)


def _room(workload: Workload) -> int | None:
    return None if workload.load is None else workload.load.cache_tokens
