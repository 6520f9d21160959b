"""kv-connector verify: canaries to fake deployments that answer right, wrong, late, or not at all."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from canary_servers import Asked, Change, FakeModelServer, answer_of, events, running
from command_line import invoke, one_line
from router_setup import PATIENCE, no_answer, nobody
from starlette.responses import JSONResponse, PlainTextResponse, Response

from kv_connector.cli.common.exit_status import ExitStatus
from kv_connector.cli.main import app
from kv_connector.cli.verify import transfers

run = partial(invoke, app)
# A run with short canaries. The salt makes the made-up answers the same in each run.
SMALL = ("--longest", "64", "--max-tokens", "8", "--timeout", "60", "--salt", "canary")
# The fewest canaries: six.
FEW = ("--route", "text")


def check(target: FakeModelServer, reference: FakeModelServer, *words: str) -> tuple[int, str]:
    with running(target, reference):
        return run("verify", target.url, "--reference", reference.url, *SMALL, *words)


def is_text(asked: Asked) -> bool:
    """Whether the prompt was sent as a text for completion."""
    return isinstance(asked.body.get("prompt"), str)


def is_canary(asked: Asked) -> bool:
    """Whether a reference gets its first canary. The prompts before it try the reference's fields."""
    return is_text(asked) and "cache_salt" in asked.body and asked.body["cache_salt"] != "canary"


class OnePrompt:
    """Changes the answers to the first prompt that passes a test."""

    def __init__(
        self,
        change: Callable[[Asked, list[int]], list[int] | Response],
        which: Callable[[Asked], bool] = is_text,
    ) -> None:
        self._change, self._which = change, which
        self.prompt: str | None = None

    def __call__(self, asked: Asked, tokens: list[int]) -> list[int] | Response:
        if self.prompt is None and self._which(asked):
            self.prompt = asked.prompt
        return self._change(asked, tokens) if asked.prompt == self.prompt else tokens


def test_equal_answers_pass_and_cover_each_kind_of_request(tmp_path: Path) -> None:
    target, reference, file = FakeModelServer(), FakeModelServer(), tmp_path / "result.json"
    status, output = check(target, reference, "--json", str(file), "--longest", "200")
    assert status == ExitStatus.SUCCESS, output
    assert "EQUAL" in output
    result = json.loads(file.read_text())
    assert result["equal"]
    assert result["faults"] == result["unstable"] == []
    assert result["compared"] == len(target.asked)
    assert len(reference.asked) >= 2 * result["canaries"]
    # Lengths around the first block boundary, which the reference's metrics give.
    lengths = {
        len(asked.body["prompt"]) for asked in target.asked if isinstance(asked.body.get("prompt"), list)
    }
    assert {31, 32, 33, 191, 192, 193} <= lengths
    kinds = {
        ("messages" in asked.body, isinstance(asked.body.get("prompt"), list), asked.body["stream"])
        for asked in target.asked
    }
    assert len(kinds) == 6
    prompts = [asked.prompt for asked in target.asked]
    assert all(prompts.count(prompt) >= 2 for prompt in prompts), "each prompt is sent again"
    for asked in target.asked:
        assert asked.body["temperature"] == 0
        assert asked.headers["x-request-id"].startswith("verify-canary-")
    assert not any("cache_salt" in asked.body for asked in target.asked)
    salts = [asked.body["cache_salt"] for asked in reference.asked[10:]]
    assert len(set(salts)) == len(salts), "the reference takes nothing from its prefix cache"


def test_a_prompt_shares_its_first_half_with_an_earlier_one() -> None:
    target = FakeModelServer()
    check(target, FakeModelServer(), "--route", "tokens", "--longest", "200")
    prompts = list(dict.fromkeys(asked.prompt for asked in target.asked))
    halves = [
        (one, other)
        for number, other in enumerate(prompts)
        for one in prompts[:number]
        if len(one) == len(other) and one[: len(one) // 2] == other[: len(one) // 2]
    ]
    assert halves


def test_canaries_are_in_flight_together_under_load() -> None:
    most, now = 0, 0
    together = asyncio.Event()

    class Slow(FakeModelServer):
        async def _complete(self, request: Any) -> Response:
            nonlocal most, now
            now += 1
            most = max(most, now)
            if now == 5:
                together.set()
            with suppress(TimeoutError):
                # Canaries of the other passes are alone, and wait for nothing.
                await asyncio.wait_for(together.wait(), 0.2)
            now -= 1
            return await super()._complete(request)

    assert check(Slow(), FakeModelServer(), *FEW, "--load", "5")[0] == ExitStatus.SUCCESS
    assert most == 5


@pytest.mark.parametrize("which", [is_text, lambda a: "messages" in a.body, lambda a: not is_text(a)])
def test_one_different_token_fails_with_its_position(which: Callable[[Asked], bool], tmp_path: Path) -> None:
    def change(asked: Asked, tokens: list[int]) -> list[int]:
        return [*tokens[:5], ord("Z"), *tokens[6:]]

    change_one = OnePrompt(change, which)
    target, file = FakeModelServer(change_one), tmp_path / "result.json"
    status, output = check(target, FakeModelServer(), "--json", str(file))
    assert status == ExitStatus.FAILURE
    assert "WRONG ANSWER: canary" in output
    assert "token 6" in output
    assert "sent again, the request gets the same wrong answer" in output
    (fault,) = json.loads(file.read_text())["faults"]
    assert (fault["kind"], fault["unit"], fault["position"]) == ("different", "token", 5)
    assert ord("Z") in fault["got_tokens"]
    assert "Z" in fault["got"]
    assert fault["margin"] == pytest.approx(5.0)
    ids = [asked.headers["x-request-id"] for asked in target.asked if asked.prompt == change_one.prompt]
    assert fault["request_id"] in ids
    assert fault["request_id"] in output


def test_answers_without_token_ids_are_compared_by_their_texts() -> None:
    change = OnePrompt(lambda asked, tokens: [*tokens[:3], ord("Z"), *tokens[4:]])
    target = FakeModelServer(change, answers_ids=False)
    status, output = check(target, FakeModelServer(answers_ids=False), *FEW)
    assert status == ExitStatus.FAILURE
    assert "character 4" in output


def test_a_fault_that_does_not_recur_is_reported_as_such() -> None:
    first: list[int] = []

    def change(asked: Asked, tokens: list[int]) -> list[int]:
        first.append(asked.number)
        return [ord("Z"), *tokens[1:]] if len(first) == 1 else tokens

    status, output = check(FakeModelServer(OnePrompt(change)), FakeModelServer(), *FEW)
    assert status == ExitStatus.FAILURE
    assert "sent again, the request is answered like the reference" in output


def test_another_prompts_answer_is_recognised() -> None:
    """The second text prompt gets the answer of the first one."""
    texts: list[str] = []

    def change(asked: Asked, tokens: list[int]) -> list[int]:
        if is_text(asked) and asked.prompt not in texts:
            texts.append(asked.prompt)
        swapped = len(texts) > 1 and asked.prompt == texts[1]
        return answer_of(texts[0], len(tokens)) if swapped else tokens

    status, output = check(FakeModelServer(change), FakeModelServer(), *FEW)
    assert status == ExitStatus.FAILURE
    assert "canary 2 " in output
    assert "the answer is the answer of canary 1" in output


def test_the_rest_of_another_prompts_answer_is_recognised() -> None:
    texts: list[str] = []

    def change(asked: Asked, tokens: list[int]) -> list[int]:
        if asked.prompt not in texts:
            texts.append(asked.prompt)
        swapped = len(texts) > 1 and asked.prompt == texts[1]
        return [*tokens[:1], *answer_of(texts[0], len(tokens))[1:]] if swapped else tokens

    status, output = check(FakeModelServer(change), FakeModelServer(), *FEW)
    assert status == ExitStatus.FAILURE
    assert "from token 2 on it is the answer of canary 1" in output


def test_the_code_of_another_canary_is_recognised() -> None:
    texts: list[str] = []

    def change(asked: Asked, tokens: list[int]) -> list[int]:
        if asked.prompt not in texts:
            texts.append(asked.prompt)
        code = texts[0].split(" ")[0]
        return [*code.encode()] if len(texts) > 1 and asked.prompt == texts[1] else tokens

    _, output = check(FakeModelServer(change), FakeModelServer(), *FEW)
    assert "the answer contains the code of canary 1" in output


def test_an_unstable_reference_answer_is_not_counted(tmp_path: Path) -> None:
    change = OnePrompt(lambda asked, tokens: [*tokens[:2], ord("A") + next(number), *tokens[3:]], is_canary)
    number, file = itertools.count(), tmp_path / "result.json"
    status, output = check(FakeModelServer(), FakeModelServer(change), "--json", str(file))
    assert status == ExitStatus.SUCCESS, output
    result = json.loads(file.read_text())
    assert len(result["unstable"]) == 1
    assert "two answers of the reference differ at token 3" in output
    assert "not counted: 1" in output


def test_a_reference_that_changes_its_answer_later_is_unstable() -> None:
    """The third answer decides if the deployment's answer differs."""
    seen: dict[str, int] = {}

    def change(asked: Asked, tokens: list[int]) -> list[int]:
        seen[asked.prompt] = seen.get(asked.prompt, 0) + 1
        return [ord("Z")] * len(tokens) if seen[asked.prompt] > 2 else tokens

    target = FakeModelServer(OnePrompt(lambda asked, tokens: [ord("Y")] * len(tokens)))
    status, output = check(target, FakeModelServer(change), *FEW)
    assert status == ExitStatus.SUCCESS
    assert "a third answer of the reference differs" in output


def test_nothing_stable_is_no_success() -> None:
    def change(asked: Asked, tokens: list[int]) -> list[int]:
        return [ord("A") + asked.number, *tokens[1:]]

    status, output = check(FakeModelServer(), FakeModelServer(change), *FEW)
    assert status == ExitStatus.FAILURE
    assert "NOT CHECKED" in output


@pytest.mark.parametrize(("tie", "expected"), [("0.1", ExitStatus.SUCCESS), ("0", ExitStatus.FAILURE)])
def test_a_difference_at_a_near_tie_counts_only_without_tie(tie: str, expected: ExitStatus) -> None:
    target = FakeModelServer(OnePrompt(lambda asked, tokens: [*tokens[:5], ord("Z"), *tokens[6:]]))
    status, output = check(target, FakeModelServer(margin=0.05), *FEW, "--tie", tie)
    assert status == expected
    assert "0.05 nats behind" in output


class Together(FakeModelServer):
    """Answers one canary of the pass under load once both its requests have arrived."""

    held: str | None = None

    async def _complete(self, request: Any) -> Response:
        prompt = (await request.json())["prompt"]
        one_at_a_time = [asked.prompt for asked in self.asked[:6]]
        if self.held is None and len(one_at_a_time) == 6 and prompt not in one_at_a_time:
            self.held, self._both = prompt, asyncio.Barrier(2)
        if prompt == self.held:
            await self._both.wait()
        return await super()._complete(request)


def test_an_unstable_canary_is_listed_once_though_two_of_its_answers_arrive_together(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    target = Together(
        lambda asked, tokens: [ord("Z"), *tokens[1:]] if asked.prompt == target.held else tokens
    )
    words = (*FEW, "--tie", "0.1", "--json", str(file))
    status, output = check(target, FakeModelServer(margin=0.05), *words)
    assert status == ExitStatus.SUCCESS, output
    assert len(json.loads(file.read_text())["unstable"]) == 1


def refuse(asked: Asked, tokens: list[int]) -> Response:
    return JSONResponse({"error": {"message": "no room"}}, 503)


def no_json(asked: Asked, tokens: list[int]) -> Response:
    return PlainTextResponse("<html>gateway</html>")


def half_a_stream(asked: Asked, tokens: list[int]) -> Response:
    return events({"choices": [{"text": "ab", "token_ids": [97, 98]}]}, done=False)


def error_event(asked: Asked, tokens: list[int]) -> Response:
    return events({"choices": [{"text": "a"}]}, {"error": {"message": "the engine is gone"}})


def cut_off(asked: Asked, tokens: list[int]) -> Response:
    return Response(b'{"choices"', headers={"content-length": "500"})


def too_long(asked: Asked, tokens: list[int]) -> Response:
    return Response(b" " * (17 << 20))


def deep(asked: Asked, tokens: list[int]) -> Response:
    return PlainTextResponse('{"choices":' + "[" * 100_000)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (refuse, "refused: http"),
        (no_json, "unreadable: http"),
        (half_a_stream, "broken off: http"),
        (error_event, "the engine is gone"),
        (cut_off, "broken off: http"),
        (too_long, "longer than 16 MiB"),
        (deep, "unreadable: http"),
    ],
)
def test_an_incomplete_answer_fails_with_its_reason(change: Change, words: str) -> None:
    streamed = change in (half_a_stream, error_event)
    one = OnePrompt(change, lambda asked: asked.body["stream"] is streamed)
    # The other way of sending is not changed.
    only = lambda asked, tokens: one(asked, tokens) if asked.body["stream"] is streamed else tokens  # noqa: E731
    status, output = check(FakeModelServer(only), FakeModelServer(), *FEW, "--load", "1")
    assert status == ExitStatus.FAILURE
    assert "NO ANSWER: canary" in output
    assert words in output


def test_an_empty_answer_fails() -> None:
    status, output = check(FakeModelServer(OnePrompt(lambda asked, tokens: [])), FakeModelServer(), *FEW)
    assert status == ExitStatus.FAILURE
    assert "EMPTY ANSWER: canary" in output


def test_an_answer_that_takes_longer_than_the_time_limit_fails() -> None:
    class Late(FakeModelServer):
        async def _complete(self, request: Any) -> Response:
            return await no_answer(request)

    status, output = check(Late(), FakeModelServer(), *FEW, "--timeout", "0.2")
    assert status == ExitStatus.FAILURE
    assert "NO ANSWER: canary" in output
    assert "within 0.2 s" in output


def test_keep_going_reports_each_fault(tmp_path: Path) -> None:
    def change(asked: Asked, tokens: list[int]) -> list[int]:
        return [ord("Z"), *tokens[1:]]

    file = tmp_path / "result.json"
    check(FakeModelServer(change), FakeModelServer(), "--keep-going", "--json", str(file))
    assert len(json.loads(file.read_text())["faults"]) == 20
    check(FakeModelServer(change), FakeModelServer(), "--json", str(file))
    assert len(json.loads(file.read_text())["faults"]) == 1


# --- Servers and options that cannot be used


def test_an_unreachable_server_is_wrong_usage() -> None:
    server = FakeModelServer()
    with running(server), nobody() as gone:
        for words in ((gone, "--reference", server.url), (server.url, "--reference", gone)):
            status, output = run("verify", *words)
            assert status == ExitStatus.USAGE
            assert f"{gone}/v1/models: no connection" in output


def test_without_a_free_socket_the_limit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(address: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("kv_connector.router.engines.client._socket", none_left)
    status, output = run("verify", "http://127.0.0.1:1")
    assert status == ExitStatus.USAGE
    assert "this command has no socket left" in one_line(output)
    assert "Too many open files" in one_line(output)
    assert "router" not in output


def test_a_reference_that_fails_later_is_wrong_usage() -> None:
    def change(asked: Asked, tokens: list[int]) -> list[int] | Response:
        return tokens if asked.number < 8 else refuse(asked, tokens)

    status, output = check(FakeModelServer(), FakeModelServer(change), *FEW)
    assert status == ExitStatus.USAGE
    assert "answered 503" in output


def test_the_models_must_agree() -> None:
    status, output = check(FakeModelServer(models=["a"]), FakeModelServer(models=["b"]))
    assert status == ExitStatus.USAGE
    assert "lists a, the reference b" in output
    several = ["a", "b"]
    status, output = check(FakeModelServer(models=several), FakeModelServer(models=several))
    assert status == ExitStatus.USAGE
    assert "--model a | b" in output
    target = FakeModelServer(models=several)
    assert check(target, FakeModelServer(models=several), *FEW, "--model", "b")[0] == ExitStatus.SUCCESS
    assert {asked.body["model"] for asked in target.asked} == {"b"}


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--salt", "a b"), "--salt"),
        (("--json", "/no/such/folder/file"), "is not a folder"),
        (("--api-key-file", "/no/such/file"), "--api-key-file"),
        (("--load", "1000"), "--load"),
        (("--route", "images"), "--route"),
    ],
)
def test_an_unusable_value_is_refused_before_anything_is_sent(words: tuple[str, ...], why: str) -> None:
    status, output = run("verify", "http://127.0.0.1:9", "--reference", "http://127.0.0.1:9", *words)
    assert status == ExitStatus.USAGE
    assert why in one_line(output)


def test_routes_that_the_reference_does_not_serve_are_left_out_unless_named() -> None:
    reference = FakeModelServer(refused=("chat", "tokenize"))
    target = FakeModelServer()
    status, output = check(target, reference)
    assert status == ExitStatus.SUCCESS
    assert "left out tokens" in output
    assert "left out chat" in output
    assert all(is_text(asked) for asked in target.asked)
    assert check(target, reference, "--route", "chat")[0] == ExitStatus.USAGE


def test_optional_fields_that_the_reference_refuses_are_left_out() -> None:
    status, output = check(FakeModelServer(), FakeModelServer(refused=("logprobs",)), *FEW, "--tie", "0.1")
    assert status == ExitStatus.SUCCESS
    assert "refuses logprobs" in output
    status, output = check(FakeModelServer(), FakeModelServer(refused=("cache_salt",)), *FEW)
    assert status == ExitStatus.SUCCESS
    assert "refuses cache_salt" in output


def test_the_api_key_is_sent_to_both_servers(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    target, reference = FakeModelServer(), FakeModelServer()
    _, output = check(target, reference, "--api-key-file", str(key), *FEW)
    for asked in (*target.asked, *reference.asked):
        assert asked.headers["authorization"] == "Bearer secret"
    assert "secret" not in output


def test_the_api_key_may_come_from_a_pipe() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"secret\n")
    os.close(writer)
    reference = FakeModelServer()
    try:
        key = ("--api-key-file", f"/dev/fd/{reader}")
        status, output = check(FakeModelServer(), reference, *key, *FEW)
    finally:
        os.close(reader)
    assert status == ExitStatus.SUCCESS, output
    assert {asked.headers["authorization"] for asked in reference.asked} == {"Bearer secret"}


def test_the_reference_may_have_another_api_key(tmp_path: Path) -> None:
    client, engine = tmp_path / "client", tmp_path / "engine"
    client.write_text("of-a-client\n")
    engine.write_text("of-the-engines\n")
    target, reference = FakeModelServer(), FakeModelServer()
    keys = ("--api-key-file", str(client), "--reference-key-file", str(engine))
    status, output = check(target, reference, *keys, *FEW)
    assert status == ExitStatus.SUCCESS, output
    assert {asked.headers["authorization"] for asked in target.asked} == {"Bearer of-a-client"}
    assert {asked.headers["authorization"] for asked in reference.asked} == {"Bearer of-the-engines"}


def test_the_default_reference_is_a_decode_engine_that_the_router_lists() -> None:
    target, reference = FakeModelServer(), FakeModelServer()
    with running(target, reference):
        states = {"http://10.0.0.1:1": "draining", f"{reference.url} rank 1": "ready"}
        target.health = {"status": "ready", "prefill": {}, "decode": states}
        status, output = run("verify", target.url, *SMALL, *FEW)
    assert status == ExitStatus.SUCCESS
    assert f"reference {reference.url}" in output
    with running(target):
        target.health = None
        status, output = run("verify", target.url, *SMALL, *FEW)
    assert status == ExitStatus.USAGE
    assert "--reference URL" in output


def test_the_result_may_have_standard_output_to_itself() -> None:
    target, reference = FakeModelServer(), FakeModelServer()
    with running(target, reference):
        words = ("verify", target.url, "--reference", reference.url, "--json", "-", *SMALL, *FEW)
        output, errors = started(*words).communicate()
    assert json.loads(output)["equal"]
    assert "EQUAL" in errors


def started(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "kv_connector.cli.main", *words],
        env={**os.environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_interrupted_run_reports_it_and_aborts_its_requests() -> None:
    arrived, gone = threading.Event(), threading.Event()

    class Silent(FakeModelServer):
        async def _complete(self, request: Any) -> Response:
            await request.json()
            arrived.set()
            answer = await no_answer(request)
            gone.set()
            return answer

    target, reference = Silent(), FakeModelServer()
    with running(target, reference):
        process = started("verify", target.url, "--reference", reference.url, *SMALL)
        assert arrived.wait(PATIENCE)
        process.send_signal(signal.SIGINT)
        process.communicate()
        assert gone.wait(PATIENCE)
    assert process.returncode == ExitStatus.INTERRUPTED


# --- Local prefills


class Router(FakeModelServer):
    """A router whose decode engine, `engine`, counts a transfer for each answer."""

    def __init__(self, engine: FakeModelServer, *, local: int = 0, transfers: bool = True) -> None:
        def change(asked: Asked, tokens: list[int]) -> list[int]:
            if asked.number < local:
                self.local.labels("no_prefill").inc()
            elif transfers:
                engine.transfers.labels("decode", "completed").inc()
            return tokens

        super().__init__(change)
        self.engine = engine

    def check(self, *words: str) -> tuple[int, str]:
        with running(self, self.engine):
            self.health = {"prefill": {}, "decode": {self.engine.url: "ready"}}
            return run("verify", self.url, *SMALL, *FEW, "--require-transfer", *words)


def test_prompts_that_were_all_transferred_pass() -> None:
    status, output = Router(FakeModelServer()).check()
    assert status == ExitStatus.SUCCESS, output


def test_a_local_prefill_fails_with_its_reason() -> None:
    status, output = Router(FakeModelServer(), local=2).check()
    assert status == ExitStatus.FAILURE
    assert "LOCAL PREFILL: decode engines computed 2 prompts themselves (no_prefill: 2)" in output


def test_missing_transfers_fail_though_the_router_counts_no_local_prefill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfers, "SETTLE_SECONDS", 0.0)
    status, output = Router(FakeModelServer(), transfers=False).check()
    assert status == ExitStatus.FAILURE
    assert "decode engines completed 0 transfers for" in output


def test_engines_without_metrics_leave_the_routers_count() -> None:
    router = Router(FakeModelServer(), transfers=False)
    router.engine.registry = router.registry.__class__()
    status, output = router.check()
    assert status == ExitStatus.SUCCESS
    assert "Only the router's count is checked" in output


def test_require_transfer_needs_our_routers_metrics() -> None:
    target = FakeModelServer()
    target.registry = target.registry.__class__()
    status, output = check(target, FakeModelServer(), *FEW, "--require-transfer")
    assert status == ExitStatus.USAGE
    assert "kv_connector_router_local_prefills" in output


def test_metrics_and_engines_are_read_at_the_routers_admin_address(tmp_path: Path) -> None:
    """Without the key, because that address has no HTTPS."""
    key = tmp_path / "key"
    key.write_text("of-a-client\n")
    router, admin = Router(FakeModelServer()), FakeModelServer()
    admin.registry, router.registry = router.registry, router.registry.__class__()
    with running(router, router.engine, admin):
        router.health = {"status": "ready"}
        admin.health = {"prefill": {}, "decode": {router.engine.url: "ready"}}
        words = ("verify", router.url, *SMALL, *FEW, "--require-transfer")
        status, output = run(*words, "--admin", admin.url, "--api-key-file", str(key))
        assert status == ExitStatus.SUCCESS, output
        assert (admin.keys, router.engine.keys) == ({None}, {"Bearer of-a-client"})
        assert f"reference {router.engine.url}" in output
        status, output = run(*words)
        assert status == ExitStatus.USAGE
        assert "name it with --admin" in " ".join(output.split())
        status, output = run(*words, "--reference", router.engine.url)
        assert status == ExitStatus.USAGE
        assert "metrics are at its --admin address" in " ".join(output.split())
