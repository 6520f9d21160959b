"""CacheRecords: what requests show about the engines' prefix caches, whichever policy places them."""

from collections import OrderedDict
from collections.abc import Callable

from kv_connector.router.bodies.prompt import PRIOR_BYTES_PER_TOKEN, Prompt, TokenSizes, bytes_per_token
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.members import Side
from kv_connector.router.engines.pool import Lease
from kv_connector.router.engines.workload import Workload
from kv_connector.router.placement.answer_repeats import AnswerKind, AnswerRepeats
from kv_connector.router.placement.lender import Prefix
from kv_connector.router.placement.policy import Placement
from kv_connector.router.placement.session_engines import SessionEngines
from kv_connector.router.requests.answers import Computed
from kv_connector.router.requests.transcript import Said

Count = Callable[[Side, int, int], None]
"""Counts the hits of a prompt whose engine has reported them: side, predicted tokens, actual tokens."""


# Prefixes of prompts whose decode engine has still to report its hits. An engine reports within a second of
# taking a prompt. 64 engines with 20 requests a second of 25 KiB have 90,000. Each takes 80 bytes, so all
# take 21 MB. Some engines never report: older releases, SGLang, and engines that do not register.
_AWAITED = 1 << 18
# A prompt of one prefix takes 0.8 KB with its lease (2026-11-30), and up to 1 KiB behind its last prefix. So
# each prompt counts for as many prefixes more.
_AWAITED_PROMPT = 24

Proposed = Callable[[str, int], None]
"""Counts a proposal to load a prefix: its result, and the tokens that were loaded."""


def _count_nothing(side: Side, predicted: int, actual: int) -> None:
    pass


def _count_no_proposal(result: str, tokens: int) -> None:
    pass


class CacheRecords:
    """Records in the engines' prefix caches what is computed and generated there.

    Nothing is recorded of an engine that refuses a request, or whose request is cancelled before. Used from
    the event loop's thread only.
    """

    def __init__(
        self,
        sizes: TokenSizes | None = None,
        sessions: SessionEngines | None = None,
        count: Count = _count_nothing,
        proposed: Proposed = _count_no_proposal,
    ) -> None:
        self.sizes = sizes or TokenSizes()
        self.sessions = SessionEngines() if sessions is None else sessions
        self._repeats = AnswerRepeats()
        self._count = count
        self._proposed = proposed
        self._awaited: OrderedDict[str, Lease] = OrderedDict()
        """Decode engines that have still to report their hits, by transfer id."""
        self._awaited_prefixes = 0
        self._answer_tokens = 0.0
        """Tokens of recent answers, on average."""

    def sent(self, transfer_id: str, lease: Lease) -> None:
        """Notes that a decode engine is to receive a prompt in this transfer, and to answer. It reports its
        hits by the id of the transfer."""
        if lease.prompt is None or not lease.prompt.prefixes or transfer_id in self._awaited:
            return
        lease.answers(round(self._answer_tokens))
        self._awaited[transfer_id] = lease
        self._awaited_prefixes += _AWAITED_PROMPT + len(lease.prompt.prefixes)
        while self._awaited_prefixes > _AWAITED:
            self._no_longer_awaited(next(iter(self._awaited)))

    def awaited(self, transfer_id: str) -> Endpoint | None:
        """Returns the decode engine that is to report its hits of this transfer; None: no engine is."""
        lease = self._awaited.get(transfer_id)
        return None if lease is None else lease.endpoint

    def received(self, transfer_id: str, tokens: int, cached: int) -> None:
        """Takes a decode engine's report on a prompt of so many tokens. ``cached``: those that were in its
        own prefix cache. Ignores prompts of other routers, and a second report."""
        if transfer_id in self._awaited:
            lease = self._no_longer_awaited(transfer_id)
            self._reported(Side.DECODE, lease, tokens, cached)
            lease.pin()  # the engine has taken blocks for the prompt

    def _no_longer_awaited(self, transfer_id: str) -> Lease:
        lease = self._awaited.pop(transfer_id)
        assert lease.prompt is not None
        self._awaited_prefixes -= _AWAITED_PROMPT + len(lease.prompt.prefixes)
        return lease

    def prefilled(self, lease: Lease, report: Computed, prefix: Prefix | None = None) -> None:
        """Takes a prefill engine's report on a prompt that it has computed.

        ``prefix``: what it was proposed to load.
        """
        lease.prompt_computed()
        self._computed(Side.PREFILL, lease, report.tokens, report.cached, prefix)
        if lease.prompt is not None:
            _has(lease.workload, lease.prompt)
            lease.pin()  # the engine keeps the blocks until a decode engine has loaded them

    def began(self, lease: Lease, placement: Placement) -> None:
        """Notes that the decode engine's answer has begun: it has the prompt's KV."""
        lease.prompt_computed()
        self.sessions.placed(placement.session, placement.prefill, lease.endpoint)
        if lease.prompt is not None:
            # The engine's room is known in tokens. It reports nothing that shows how many bytes these are.
            _has(lease.workload, lease.prompt, lease.context)
            lease.pin()
            lease.answers(round(self._answer_tokens))

    def answered(self, lease: Lease, said: Said, placement: Placement, *, moved: Lease | None) -> None:
        """Notes the whole answer, whose decode engine has the KV of prompt and answer.

        If the next turn is expected to have other token ids, or the engine keeps no answers, the answer only
        takes room there. Of a prompt that came from a prefill engine, the decode engine counts all tokens as
        cached.

        ``moved``: lease of the engine where the answer ended, if the stream has moved.
        """
        prompt = lease.prompt
        if prompt is None:
            return
        if placement.prefill is None:
            self._computed(Side.DECODE, lease, said.prompt_tokens, said.cached_tokens, placement.prefix)
        if (continued := continued_by(prompt, said)) is not None:
            engine, kind = moved or lease, AnswerKind.of(prompt, said)
            if continued is not prompt:  # otherwise nothing is known of the answer's size
                tokens = _answer_tokens(prompt, continued, lease.context)
                self._answer_tokens += (tokens - self._answer_tokens) / 8
            keeps = engine.workload.keeps_answers
            if keeps:
                self._repeats.answered(kind, engine.endpoint, lease.context, prompt, continued)
            if not (keeps and self._repeats.expected(kind)):
                continued = continued.hidden_behind(prompt)
            engine.end_loading()
            _has(engine.workload, continued)

    def repeats(self, prompt: Prompt, said: Said) -> bool:
        """Returns whether the next turn is expected to have the token ids of this answer."""
        return self._repeats.expected(AnswerKind.of(prompt, said))

    def prefetched(self, lease: Lease, lender: Endpoint, tokens: int) -> None:
        """Notes that a prefill engine has loaded the end of the lease's prompt, so many tokens."""
        if lease.prompt is not None:
            _has(lease.workload, lease.prompt)
        lease.workload.use.borrow(lender, tokens)

    def _computed(
        self, side: Side, lease: Lease, tokens: int | None, cached: int | None, prefix: Prefix | None
    ) -> None:
        """Takes the count of the engine that has computed a prompt. ``cached``: tokens that it had cached or
        has loaded. ``prefix``: what it was proposed to load."""
        own = cached if prefix is None else self._own(lease, prefix, tokens, cached)
        self._reported(side, lease, tokens, own, (cached or 0) - (own or 0))

    def _own(self, lease: Lease, prefix: Prefix, tokens: int | None, cached: int | None) -> int | None:
        """Counts a proposal by its result. Returns the tokens that were in the engine's own cache.

        Engines report tokens of their own cache and loaded tokens in one number. The engine lacks the prefix
        behind those that it has, so its own tokens end before the end of that prefix.
        """
        prompt = lease.prompt
        if prompt is None or cached is None or tokens is None:
            self._proposed("unknown", 0)
            return None
        own = lease.workload.hit(prompt.tokens_of(lease.expected, tokens))
        most = prompt.tokens_of(prompt.end_behind(lease.expected), tokens)
        # In a chat, what the engine has ends with a message, so it is known to a block. Elsewhere it may end
        # anywhere before the end of the next prefix.
        if 2 * cached <= own + most if prompt.in_messages else cached <= most:
            self._proposed("computed", 0)
            return cached
        self._proposed("borrowed", cached - own)
        lease.workload.use.borrow(prefix.lender, cached - own)
        return own

    def _reported(
        self, side: Side, lease: Lease, tokens: int | None, cached: int | None, borrowed: int = 0
    ) -> None:
        """Takes an engine's count of a prompt. ``cached``: tokens that were in its own cache. ``borrowed``:
        tokens that it has loaded."""
        prompt = lease.prompt
        if prompt is None or tokens is None or tokens < 1:
            return
        if cached is not None and not 0 <= cached <= tokens:
            cached = None  # an engine that counts wrongly must not spoil the index and the counters
        self.sizes.learn(prompt, tokens)
        predicted = lease.workload.hit(min(prompt.tokens_of(lease.expected, tokens), tokens - 1))
        computed = tokens - borrowed - (predicted if cached is None else cached)
        lease.counted(tokens if side is Side.DECODE else max(1, computed))
        if cached is not None and prompt.measurable:
            if side is Side.DECODE:
                self._repeats.reported(lease, tokens, cached)
            lease.workload.cache.corrected(prompt, cached, tokens, lease.expected)
            lease.workload.use.predicted += predicted
            lease.workload.use.actual += cached
            self._count(side, predicted, cached)


def continued_by(prompt: Prompt, said: Said) -> Prompt | None:
    """Returns the beginning of the next turn's prompt; None: the answer is not known."""
    answer = said.answer if prompt.tokens is None else said.ids
    return prompt.followed_by(answer) if answer else None


def _answer_tokens(prompt: Prompt, continued: Prompt, tokens: int) -> float:
    """Returns the tokens of an answer, about. ``continued``: the prompt of so many ``tokens``, and it."""
    if prompt.tokens is not None and continued.tokens is not None:
        return continued.tokens - prompt.tokens
    size = bytes_per_token(prompt, tokens) if tokens and prompt.measurable else PRIOR_BYTES_PER_TOKEN
    return (continued.size - prompt.size) / size


def _has(workload: Workload, prompt: Prompt, tokens: int = 0) -> None:
    room = None if workload.load is None else workload.load.cache_tokens
    workload.cache.prompt_computed(prompt, room, tokens)
