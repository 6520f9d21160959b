"""References to KV pages that must not be used, sent to a decode engine: does it give a wrong answer?

The five cases of vLLM issue 52234 and the case of aws-do-eks 84, for this project's connector and for
NixlConnector, on CPUs. Exits with 1 if WriteImmConnector gives a wrong answer.
"""
# ruff: noqa: T201  (its output is a table)

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from kv_connector.lab.cluster import HOST, MODEL_NAME, EngineProcess, EngineSettings, LocalCluster
from kv_connector.lab.free_ports import free_ports
from kv_connector.lab.model import make_gemma3, make_llama
from kv_connector.lab.process import leave_on_signals

# Ten blocks. All prompts end with the same token: the decode engine computes the last token itself. Over the
# pages of another prompt it then gives exactly the answer of that prompt.
PROMPT_TOKENS = 310
BLOCK = 32
# The prefill engine's pool: one block that vLLM keeps, and six prompts. vLLM takes freed blocks in the
# reverse order, so the twelfth prompt after one has its pages in the same blocks, in the same order.
POOL_BLOCKS = 61
LATER_PROMPTS = 12
OUTPUT_TOKENS = 16
# Time that a prefill engine keeps pages for a decode engine (NixlConnector's default: 30 s, ours: 20 s), and
# the time after which a reference is late.
LEASE_SECONDS = 5
LATE_SECONDS = 12
# A request that the engine neither answers nor refuses.
ANSWER_SECONDS = 90.0

Reference = dict[str, Any]


@dataclass(frozen=True)
class AnswerOutcome:
    status: int
    """HTTP status; 0: no answer within ANSWER_SECONDS, or the connection broke."""
    answer: str
    """Verdict: the right answer, another prompt's answer, or a wrong answer. Empty without an answer."""

    def __str__(self) -> str:
        if not self.status:
            return "no answer"
        return f"{self.status}, {self.answer}" if self.answer else f"{self.status}"

    @property
    def wrong(self) -> bool:
        return self.answer not in ("", "right answer")


class ComparedPair:
    """A prefill and a decode engine, and the right answers of an engine alone."""

    def __init__(self, prefill: EngineProcess, decode: EngineProcess, alone: EngineProcess) -> None:
        self._prefill, self._decode = prefill, decode
        self._http = httpx.Client(timeout=ANSWER_SECONDS, trust_env=False)
        self.first, self.second = prompt("first"), prompt("second")
        self._right = [
            self._tokens(self._post(alone, one, OUTPUT_TOKENS)) for one in (self.first, self.second)
        ]
        if self._right[0] == self._right[1]:
            raise SystemExit("the two prompts have the same answer: the model cannot show a wrong one")

    def reference(self, tokens: Sequence[int]) -> Reference:
        """Has the prefill engine compute a prompt; returns its reference for a decode engine."""
        asked = {"do_remote_decode": True, "do_remote_prefill": False}
        answered = self._post(self._prefill, tokens, 1, asked)
        found: Reference = answered.json()["kv_transfer_params"]
        return found

    def compute(self, tokens: Sequence[int], times: int) -> None:
        """Has the prefill engine compute a prompt for itself, which takes the blocks of ended requests."""
        for _ in range(times):
            self._post(self._prefill, tokens, 1)

    def answer(self, tokens: Sequence[int], reference: Reference) -> AnswerOutcome:
        """Sends the prompt to the decode engine with this reference."""
        try:
            answered = self._post(self._decode, tokens, OUTPUT_TOKENS, reference)
        except httpx.HTTPStatusError as error:
            return AnswerOutcome(error.response.status_code, "")
        except httpx.HTTPError:
            return AnswerOutcome(0, "")
        given = self._tokens(answered)
        right = self._right[0 if tokens == self.first else 1]
        if given == right:
            return AnswerOutcome(200, "right answer")
        return AnswerOutcome(200, "another prompt's answer" if given in self._right else "wrong answer")

    def _post(
        self, engine: EngineProcess, tokens: Sequence[int], output: int, params: Reference | None = None
    ) -> httpx.Response:
        body = {
            "model": MODEL_NAME,
            "prompt": list(tokens),
            "max_tokens": output,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **({} if params is None else {"kv_transfer_params": params}),
        }
        response = self._http.post(f"{engine.url}/v1/completions", json=body)
        response.raise_for_status()
        return response

    @staticmethod
    def _tokens(response: httpx.Response) -> list[int]:
        found: list[int] = response.json()["choices"][0]["token_ids"]
        return found


def prompt(seed: str) -> list[int]:
    return [*random.Random(seed).choices(range(256), k=PROMPT_TOKENS - 1), 7]


def sound(pair: ComparedPair) -> AnswerOutcome:
    return pair.answer(pair.first, pair.reference(pair.first))


def unknown(pair: ComparedPair) -> AnswerOutcome:
    reference = pair.reference(pair.first)
    named = [name for name in ("transfer_id", "remote_request_id") if name in reference]
    return pair.answer(pair.first, reference | dict.fromkeys(named, "no-such-request"))


def out_of_range(pair: ComparedPair) -> AnswerOutcome:
    reference = pair.reference(pair.first)
    blocks = reference.get("remote_block_ids") or [list(range(-(-PROMPT_TOKENS // BLOCK)))]
    beyond = [[10**6 + number for number in range(len(group))] for group in blocks]
    return pair.answer(pair.first, reference | {"remote_block_ids": beyond})


def used_twice(pair: ComparedPair) -> AnswerOutcome:
    reference = pair.reference(pair.first)
    pair.answer(pair.first, reference)
    return pair.answer(pair.first, reference)


def blocks_used_again(pair: ComparedPair) -> AnswerOutcome:
    reference = pair.reference(pair.first)
    pair.answer(pair.first, reference)
    pair.compute(pair.second, LATER_PROMPTS)
    return pair.answer(pair.first, reference)


def late(pair: ComparedPair) -> AnswerOutcome:
    reference = pair.reference(pair.first)
    time.sleep(LATE_SECONDS)
    return pair.answer(pair.first, reference)


def late_and_used_again(pair: ComparedPair) -> AnswerOutcome:
    reference = pair.reference(pair.first)
    time.sleep(LATE_SECONDS)
    pair.compute(pair.second, LATER_PROMPTS)
    return pair.answer(pair.first, reference)


CASES: dict[str, Callable[[ComparedPair], AnswerOutcome]] = {
    "a sound reference": sound,
    "the reference of an unknown request": unknown,
    "block numbers out of range": out_of_range,
    "a reference used twice": used_twice,
    "a used reference, whose blocks have another prompt's pages": blocks_used_again,
    f"a reference {LATE_SECONDS} s old, with a lease of {LEASE_SECONDS} s": late,
    "the same, whose blocks have another prompt's pages": late_and_used_again,
}

CONNECTORS = ("WriteImmConnector", "NixlConnector")
MODELS: dict[str, Callable[[Path], Path]] = {
    "llama": make_llama,
    "gemma3": lambda path: make_gemma3(path, layers=6, full_attention_every=3, sliding_window=128),
}


def start(cluster: LocalCluster, connector: str) -> tuple[EngineProcess, EngineProcess]:
    if connector == "WriteImmConnector":
        timeouts = {"hold": LEASE_SECONDS, "orphan": LEASE_SECONDS}
        extra = {"providers": ["tcp"], "timeouts": timeouts}
        prefill = cluster.start_engine("ours-prefill", role="kv_producer", extra=extra)
        return prefill, cluster.start_engine("ours-decode", role="kv_consumer", extra=extra)
    started = []
    for name, role in (("nixl-prefill", "kv_producer"), ("nixl-decode", "kv_consumer")):
        transfer = {
            "kv_connector": connector,
            "kv_role": role,
            "kv_buffer_device": "cpu",
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {"kv_lease_duration": LEASE_SECONDS},
        }
        (port,) = free_ports(1)
        environment = {"VLLM_NIXL_SIDE_CHANNEL_HOST": HOST, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
        arguments = (*cluster.settings.arguments, "--kv-transfer-config", json.dumps(transfer))
        settings = replace(cluster.settings, arguments=arguments, environment=environment)
        started.append(cluster.start_engine(name, settings=settings))
    return started[0], started[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--connectors", nargs="+", default=list(CONNECTORS), choices=CONNECTORS)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--logs", type=Path, help="Folder for the engines' logs. Default: a temporary one.")
    options = parser.parse_args()
    outcomes: dict[tuple[str, str], dict[str, AnswerOutcome]] = {}
    with tempfile.TemporaryDirectory() as temporary, leave_on_signals():
        for model in options.models:
            path = MODELS[model](Path(temporary) / model)
            for connector in options.connectors:
                logs = (options.logs or Path(temporary) / "logs") / f"{model}-{connector}"
                outcomes[model, connector] = measure(path, connector, logs)
                for case, outcome in outcomes[model, connector].items():
                    print(f"{model}, {connector}, {case}: {outcome}", flush=True)
    print_table(outcomes)
    ours = [
        found for (_, name), cases in outcomes.items() if name == CONNECTORS[0] for found in cases.values()
    ]
    return int(any(outcome.wrong for outcome in ours))


def measure(model: Path, connector: str, logs: Path) -> dict[str, AnswerOutcome]:
    settings = EngineSettings(
        max_model_len=512,
        block_size=BLOCK,
        prefix_caching=False,
        arguments=("--num-gpu-blocks-override", str(POOL_BLOCKS)),
    )
    with LocalCluster(logs, model, settings) as cluster:
        alone = cluster.start_engine("alone")
        prefill, decode = start(cluster, connector)
        cluster.wait_ready(seconds=600)
        pair = ComparedPair(prefill, decode, alone)
        return {case: run(pair) for case, run in CASES.items()}


def print_table(outcomes: Mapping[tuple[str, str], Mapping[str, AnswerOutcome]]) -> None:
    print("\n| case |", " | ".join(f"{model}, {name}" for model, name in outcomes), "|")
    print("|---" * (len(outcomes) + 1) + "|")
    for case in CASES:
        print(f"| {case} |", " | ".join(str(found[case]) for found in outcomes.values()), "|")


if __name__ == "__main__":
    sys.exit(main())
