"""Run: asks the reference first, then the deployment one at a time and under load, and compares."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

import msgspec

from kv_connector import __version__
from kv_connector.cli.verify.canaries import END, SHORT_WORDS, Cache, Canary, Maker, Route, Tokenized, lengths
from kv_connector.cli.verify.server import CanaryReply, Sampling, ServerError, Trouble, VerifiedServer
from kv_connector.cli.verify.transfers import Counts, Meter, problem
from kv_connector.lab.comparison import Difference, Output, first_difference, whose

T = TypeVar("T")

# Faults after which a run ends in any case: more of them say nothing new.
MOST_FAULTS = 20
# Tokens that a word of a prompt takes at most, with a tokenizer of bytes and with "harbor. ".
TOKENS_IN_WORD = 10
# Statuses by which a server reports that it does not serve a route, or not this model on it.
_NOT_SERVED = (400, 404, 405, 422, 501)


class AnswerFaultKind(StrEnum):
    DIFFERENT = "different"
    EMPTY = "empty"
    ERROR = "error"
    LOCAL = "local"


class AnswerFault(msgspec.Struct, kw_only=True):
    """A wrong answer, or none."""

    kind: AnswerFaultKind
    words: str
    """Description of the fault, or the error of the server."""
    canary: int | None = None
    request: str = ""
    """How the canary was sent."""
    request_id: str = ""
    reference_request_id: str = ""
    served_by: dict[str, str] = {}
    """Headers of the answer that name engines, if the router sends any."""
    unit: str = ""
    position: int | None = None
    """Number of equal tokens or characters at the beginning of both answers."""
    expected: str = ""
    got: str = ""
    """The texts around the first difference."""
    expected_tokens: tuple[int, ...] = ()
    got_tokens: tuple[int, ...] = ()
    margin: float | None = None
    """Distance of the reference's token to the next best candidate, in nats."""
    answer_of: list[int] = []
    """Canaries whose reference answer came instead, from the position on."""
    code_of: list[int] = []
    """Other canaries whose code is in the answer."""
    again: str = ""
    """Outcome of the same request, sent once more."""


class Unstable(msgspec.Struct, frozen=True):
    """A canary that is not counted."""

    canary: int
    why: str


class Result(msgspec.Struct, kw_only=True):
    """The outcome of a run."""

    version: str = __version__
    target: str
    reference: str
    model: str
    salt: str
    block: int
    canaries: int = 0
    compared: int = 0
    """Answers of the deployment that were compared."""
    unstable: list[Unstable] = []
    alike: int = 0
    """Canaries whose reference answer another canary has, too: exchanged answers of these are not noticed."""
    faults: list[AnswerFault] = []
    transfers: Counts | None = None
    """The router's and engines' counters during the run, with --require-transfer."""
    expected_transfers: int = 0
    notes: list[str] = []
    seconds: float = 0.0
    equal: bool = False


@dataclass(frozen=True)
class VerificationPlan:
    target: VerifiedServer
    reference: VerifiedServer
    sampling: Sampling
    routes: Sequence[Route]
    all_routes: bool
    """Leave out routes that the reference does not serve."""
    block: int
    longest: int
    """Longest prompt, in tokens."""
    load: int
    """Canaries in flight at a time, in the second pass."""
    rounds: int
    salt: str
    tie: float
    """Largest margin, in nats, of a difference that is not counted."""
    keep_going: bool
    meter: Meter | None = None


class UnusableError(Exception):
    """The reference cannot be used. The message says what to change."""


@dataclass(frozen=True)
class _Question:
    canary: Canary
    stream: bool
    cache: Cache
    load: int

    def __str__(self) -> str:
        return f"prefix cache: {self.cache.value}, {'streamed' if self.stream else 'not streamed'}, " + (
            f"{self.load} at a time" if self.load > 1 else "one at a time"
        )


async def verify(plan: VerificationPlan, say: Callable[[str], None]) -> Result:
    """Returns the outcome. `say` gets a line after each pass.

    UnusableError: the reference cannot be used. ServerError: it does not answer.
    """
    return await _Run(plan, say).run()


@dataclass
class _Run:
    plan: VerificationPlan
    say: Callable[[str], None]
    references: dict[int, CanaryReply] = field(default_factory=dict)
    """Stable answers of the reference by canary: the first of each, one at a time."""
    canaries: dict[int, Canary] = field(default_factory=dict)
    requests: int = 0

    def __post_init__(self) -> None:
        plan = self.plan
        self.result = Result(
            target=plan.target.url,
            reference=plan.reference.url,
            model=plan.sampling.model,
            salt=plan.salt,
            block=plan.block,
        )
        self.random = random.Random(f"{plan.salt}-order")
        self.maker = Maker(plan.salt)
        self.routes: list[Route] = []
        self.end: tuple[int, ...] = ()
        self.extras: dict[Route, dict[str, Any]] = {}

    async def run(self) -> Result:
        began = time.monotonic()
        plan, result = self.plan, self.result
        await self._probe()
        before = None if plan.meter is None else await plan.meter.read()
        for number in range(plan.rounds):
            await self._round(f", round {number + 1} of {plan.rounds}" if plan.rounds > 1 else "")
            if self._done:
                break
        result.alike = _alike(one.output for one in self.references.values())
        if plan.meter is not None and before is not None and not self._done:
            result.transfers = await plan.meter.settled(before, result.expected_transfers)
            if words := problem(result.transfers, result.expected_transfers):
                result.faults.append(AnswerFault(kind=AnswerFaultKind.LOCAL, words=words))
        result.seconds = round(time.monotonic() - began, 3)
        result.equal = not result.faults and result.compared > 0
        return result

    @property
    def _done(self) -> bool:
        found = len(self.result.faults)
        return found >= MOST_FAULTS or (found > 0 and not self.plan.keep_going)

    # --- The reference

    async def _probe(self) -> None:
        """Finds the routes that the reference serves, and the optional fields that it accepts."""
        for route in self.plan.routes:
            try:
                await self._probe_route(route)
            except ServerError as error:
                if not (self.plan.all_routes and _not_served(error)):
                    raise
                self.result.notes.append(f"left out {route.value}: {error}")
            else:
                self.routes.append(route)
        if not self.routes:
            raise UnusableError("the reference serves no route: " + "; ".join(self.result.notes))

    async def _probe_route(self, route: Route) -> None:
        maker = Maker(f"{self.plan.salt}-probe-{route.value}")
        code = maker.code()
        if route is Route.TOKENS:
            tokens = await self._tokens(maker.text(code, SHORT_WORDS), special=True)
            self.end = await self._tokens(END, special=False)
            canary = maker.of_tokens(code, len(tokens), Tokenized(tokens, ()))
        else:
            canary = maker.of_text(route, code, SHORT_WORDS)
        logprobs = {"logprobs": True, "top_logprobs": 2} if route is Route.CHAT else {"logprobs": 2}
        salt = {"cache_salt": self.plan.salt}
        # The reference must not take pages from its prefix cache, because the deployment may have put them
        # there. The candidates only describe a difference.
        for extra in ({**salt, **logprobs}, salt, {}):
            try:
                await self._ask(self.plan.reference, canary, stream=False, extra=extra)
            except ServerError as error:
                if not (extra and _not_served(error)):
                    raise
            else:
                break
        if "cache_salt" not in extra:
            self.result.notes.append(
                f"{route.value}: the reference refuses cache_salt, so its prefix cache may hold pages of the "
                "deployment"
            )
        if len(extra) < 2 and self.plan.tie:
            self.result.notes.append(
                f"{route.value}: the reference refuses logprobs, so --tie has no effect there"
            )
        self.extras[route] = extra

    async def _refer(self, canaries: Sequence[Canary]) -> None:
        """Gets two reference answers to each canary: one at a time, and under the same load as later."""
        first = await self._each(canaries, 1, lambda one: self._reference(one, stream=False, candidates=True))
        second = await self._each(
            canaries, self.plan.load, lambda one: self._reference(one, stream=True, candidates=False)
        )
        for canary, one, two in zip(canaries, first, second, strict=True):
            self.canaries[canary.number] = canary
            if one.output.empty:
                self._leave_out(canary, "the reference's answer is empty")
            elif difference := first_difference(one.output, two.output):
                self._leave_out(canary, f"two answers of the reference differ at {_place(difference)}")
            else:
                self.references[canary.number] = one

    def _leave_out(self, canary: Canary, why: str) -> None:
        self.references.pop(canary.number, None)
        self.result.unstable.append(Unstable(canary.number, why))

    async def _reference(self, canary: Canary, *, stream: bool, candidates: bool) -> CanaryReply:
        extra = dict(self.extras[canary.route])
        if "cache_salt" in extra:
            extra["cache_salt"] = f"{self.plan.salt}-{self.requests}"  # another one for each request
        if not candidates:
            extra = {key: value for key, value in extra.items() if "logprobs" not in key}
        return await self._ask(self.plan.reference, canary, stream=stream, extra=extra)

    async def _tokens(self, text: str, *, special: bool) -> tuple[int, ...]:
        return await self.plan.reference.tokenize(self.plan.sampling.model, text, special=special)

    # --- The canaries

    async def _make(self) -> list[Canary]:
        """Returns the canaries of one set. Their second halves differ from all earlier ones'."""
        made: list[Canary] = []
        for route in self.routes:
            if route is Route.TOKENS:
                by_length = {}
                for length in lengths(self.plan.block, self.plan.longest):
                    by_length[length] = await self._of_tokens(length)
                halves = [
                    await self._of_tokens(n, by_length[n]) for n in by_length if n > 2 * self.plan.block
                ]
                made += [*by_length.values(), *halves]
            else:
                words = max(self.plan.longest // (2 * TOKENS_IN_WORD), SHORT_WORDS)
                short = self.maker.of_text(route, self.maker.code(), SHORT_WORDS)
                long = self.maker.of_text(route, self.maker.code(), words)
                half = self.maker.of_text(route, self.maker.code(), words // 2, long)
                made += [short, long, half]
        return made

    async def _of_tokens(self, length: int, first: Canary | None = None) -> Canary:
        code = self.maker.code()
        # Each word has at least one token.
        text = self.maker.text(code, length, end=False)
        tokens = await self._tokens(text, special=first is None)
        return self.maker.of_tokens(code, length, Tokenized(tokens, self.end), first)

    # --- The deployment

    async def _round(self, where: str) -> None:
        plan, result = self.plan, self.result
        kept, fresh = await self._make(), await self._make()
        await self._refer([*kept, *fresh])
        result.canaries += len(kept) + len(fresh)
        stable = len(self.references)
        self.say(f"reference{where}: answered {result.canaries} canaries twice, {stable} are stable")
        alone = [
            _Question(one, stream, cache, 1)
            for number, one in enumerate(kept)
            for stream, cache in ((number % 2 == 0, one.cache), (number % 2 == 1, Cache.HIT))
        ]
        await self._pass(alone, 1, f"one at a time{where}")
        if self._done:
            return
        known = [_Question(one, n % 2 == 0, Cache.HIT, plan.load) for n, one in enumerate(kept)]
        new = [_Question(one, n % 2 == 1, one.cache, plan.load) for n, one in enumerate(fresh)]
        again = [_Question(one, n % 2 == 0, Cache.HIT, plan.load) for n, one in enumerate(fresh)]
        mixed = [*known, *new]
        self.random.shuffle(mixed)
        self.random.shuffle(again)
        await self._pass([*mixed, *again], plan.load, f"{plan.load} at a time{where}")

    async def _pass(self, questions: Sequence[_Question], load: int, where: str) -> None:
        before = self.result.compared
        wanted = [one for one in questions if one.canary.number in self.references]
        await self._each(wanted, load, self._check)
        compared = self.result.compared - before
        if not self._done:
            self.say(f"{where}: compared {compared} answers")

    async def _check(self, question: _Question) -> None:
        """Sends one canary to the deployment and compares the answer."""
        canary = question.canary
        reference = self.references.get(canary.number)
        if self._done or reference is None:
            return
        try:
            reply = await self._ask(self.plan.target, canary, stream=question.stream)
        except ServerError as error:
            words = f"{error.trouble.value}: {error}"
            self._fault(question, AnswerFaultKind.ERROR, words, request_id=error.request_id)
            return
        if canary.number not in self.references:
            return  # it was left out meanwhile
        self.result.compared += 1
        if question.cache is Cache.MISS and (reference.prompt_tokens or 0) > 2 * self.plan.block:
            self.result.expected_transfers += 1
        difference = first_difference(reference.output, reply.output)
        if difference is not None:
            await self._differs(question, reference, reply, difference)

    async def _differs(
        self, question: _Question, reference: CanaryReply, reply: CanaryReply, difference: Difference
    ) -> None:
        canary, tie = question.canary, self.plan.tie
        if difference.margin is not None and difference.margin <= tie:
            self._leave_out(
                canary,
                f"the deployment's answer differs at {_place(difference)}, where the reference's second "
                f"candidate is only {difference.margin:.3g} nats behind (--tie)",
            )
            return
        try:
            third = await self._reference(canary, stream=False, candidates=False)
        except ServerError:
            third = reference
        if canary.number not in self.references:
            return  # it was left out meanwhile
        if first_difference(reference.output, third.output) is not None:
            self._leave_out(canary, "a third answer of the reference differs from the first two")
            return
        others = {n: one.output for n, one in self.references.items() if n != canary.number}
        text = reply.output.text
        codes = [
            one.number
            for one in self.canaries.values()
            if one.code in text and one.code != canary.code and one.code not in reference.output.text
        ]
        self._fault(
            question,
            AnswerFaultKind.EMPTY if reply.output.empty else AnswerFaultKind.DIFFERENT,
            "the answer is empty" if reply.output.empty else f"the answers differ at {_place(difference)}",
            request_id=reply.request_id,
            reference_request_id=reference.request_id,
            served_by=reply.served_by,
            unit=difference.unit,
            position=difference.position,
            expected=difference.expected,
            got=difference.got,
            expected_tokens=difference.expected_tokens,
            got_tokens=difference.got_tokens,
            margin=difference.margin,
            answer_of=whose(reply.output, difference.position, others),
            code_of=codes,
            again=await self._again(question, reference, reply),
        )

    async def _again(self, question: _Question, reference: CanaryReply, reply: CanaryReply) -> str:
        """Sends the same request once more, which shows whether the fault persists."""
        try:
            again = await self._ask(self.plan.target, question.canary, stream=question.stream)
        except ServerError as error:
            return f"sent again, the request fails: {error}"
        if first_difference(reference.output, again.output) is None:
            return "sent again, the request is answered like the reference"
        if first_difference(reply.output, again.output) is None:
            return "sent again, the request gets the same wrong answer"
        return "sent again, the request gets a third answer"

    def _fault(self, question: _Question, kind: AnswerFaultKind, words: str, **more: Any) -> None:
        if self._done:  # another canary in flight was faster
            return
        found = AnswerFault(
            kind=kind, words=words, canary=question.canary.number, request=str(question), **more
        )
        self.result.faults.append(found)

    # --- Requests

    async def _ask(
        self, server: VerifiedServer, canary: Canary, *, stream: bool, extra: Mapping[str, Any] | None = None
    ) -> CanaryReply:
        self.requests += 1
        body = self.plan.sampling.body(canary, stream=stream) | dict(extra or {})
        request_id = f"verify-{self.plan.salt}-{self.requests}"
        try:
            return await server.answer(canary.route.path, body, request_id)
        except ServerError as error:
            error.request_id = request_id
            raise

    async def _each(self, items: Sequence[T], load: int, act: Callable[[T], Awaitable[Any]]) -> list[Any]:
        """Acts on each item, `load` at a time. The first exception ends all of it."""
        results: list[Any] = [None] * len(items)
        todo = iter(enumerate(items))

        async def work() -> None:
            for number, item in todo:
                results[number] = await act(item)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(load, len(items))):
                    group.create_task(work())
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        return results


def _not_served(error: ServerError) -> bool:
    return error.status in _NOT_SERVED or error.trouble is Trouble.UNREADABLE


def _alike(outputs: Iterable[Output]) -> int:
    counted = Counter(one.tokens or one.text for one in outputs)
    return sum(count for count in counted.values() if count > 1)


def _place(difference: Difference) -> str:
    return f"{difference.unit} {difference.position + 1}"
