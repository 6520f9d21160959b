"""CacheRecords: what requests show about the engines' prefix caches, whichever policy places them."""

from collections.abc import Callable

from kv_connector.router.engines.members import Side
from kv_connector.router.engines.pool import Lease
from kv_connector.router.engines.prompt import Prompt, TokenSizes
from kv_connector.router.engines.workload import Workload
from kv_connector.router.placement.policy import Placement
from kv_connector.router.placement.sessions import Sessions
from kv_connector.router.requests.answers import Computed
from kv_connector.router.requests.transcript import Said

Count = Callable[[Side, int, int], None]
"""Counts the hits of a prompt whose engine has reported them: side, predicted tokens, actual tokens."""


def _count_nothing(side: Side, predicted: int, actual: int) -> None:
    pass


class CacheRecords:
    """Records in the engines' prefix caches what is computed and generated there.

    Nothing is recorded of an engine that refuses a request, or whose request is cancelled before. Used from
    the event loop's thread only.
    """

    def __init__(
        self,
        sizes: TokenSizes | None = None,
        sessions: Sessions | None = None,
        count: Count = _count_nothing,
    ) -> None:
        self.sizes = sizes or TokenSizes()
        self.sessions = Sessions() if sessions is None else sessions
        self._count = count

    def prefilled(self, lease: Lease, report: Computed) -> None:
        """Takes a prefill engine's report on a prompt that it has computed."""
        lease.prompt_computed()
        self._reported(Side.PREFILL, lease, report.tokens, report.cached)
        if lease.prompt is not None:
            _computed(lease.workload, lease.prompt)

    def began(self, lease: Lease, placement: Placement) -> None:
        """Notes that the decode engine's answer has begun: it has the prompt's KV."""
        lease.prompt_computed()
        self.sessions.placed(placement.session, placement.prefill, lease.endpoint)
        if lease.prompt is not None:
            _computed(lease.workload, lease.prompt)

    def answered(self, lease: Lease, said: Said, *, moved: Lease | None, local: bool) -> None:
        """Notes the whole answer, whose decode engine has the KV of prompt and answer.

        ``moved``: lease of the engine where the answer ended, if the stream has moved. ``local``: the decode
        engine has computed the prompt. Of a prompt that came from a prefill engine, it counts all tokens as
        cached.
        """
        prompt = lease.prompt
        if prompt is None:
            return
        if local:
            self._reported(Side.DECODE, lease, said.prompt_tokens, said.cached_tokens)
        answer = said.answer if prompt.tokens is None else said.ids
        if answer:
            _computed((moved or lease).workload, prompt.followed_by(answer))

    def _reported(self, side: Side, lease: Lease, tokens: int | None, cached: int | None) -> None:
        prompt = lease.prompt
        if prompt is None or tokens is None:
            return
        self.sizes.learn(prompt, tokens)
        predicted = prompt.tokens_of(lease.expected, tokens)
        computed = tokens - (predicted if cached is None else cached)
        lease.counted(tokens if side is Side.DECODE else max(1, computed))
        if cached is not None and prompt.measurable:
            lease.workload.cache.corrected(prompt, cached, tokens, lease.expected)
            self._count(side, predicted, cached)


def _computed(workload: Workload, prompt: Prompt) -> None:
    workload.cache.prompt_computed(prompt, None if workload.load is None else workload.load.cache_tokens)
