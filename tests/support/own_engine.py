"""A program that runs an LLM or an AsyncLLM itself, without vLLM's API server.

    own_engine.py llm|async MODEL REPORT

It takes one version of weights. REPORT gets JSON lines: tokens before, the version, and tokens after.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from deployment import prompt

PROMPTS = [(number, tokens) for number, tokens in enumerate((1, 7, 33, 400))]
STREAMED = PROMPTS[-1]
TOKENS = 16
LONG = 1500  # tokens of the stream that goes on over the update
PATIENCE_S = 240.0
SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",  # other batches than the API server's give the same tokens
    "enforce_eager": True,
    "max_model_len": 1984,
    "max_num_seqs": 16,
    "block_size": 32,
    "kv_cache_memory_bytes": 256 << 20,
    "weight_transfer_config": {"backend": "write_imm"},
}


def main(kind: str, model: str, report: Path) -> None:
    def tell(**values: Any) -> None:
        with report.open("a") as file:
            file.write(json.dumps(values) + "\n")

    if kind == "llm":
        offline(model, tell)
    else:
        asyncio.run(online(model, tell))


def parameters(tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)


def offline(model: str, tell: Any) -> None:
    from vllm import LLM

    from kv_connector.vllm.weights.serving import WeightTaker

    llm = LLM(model=model, **SETTINGS)

    def answers() -> list[list[int]]:
        given = [{"prompt_token_ids": prompt(number, tokens)} for number, tokens in PROMPTS]
        done = llm.generate(given, parameters(TOKENS), use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in done]

    with WeightTaker(llm) as weights:
        assert weights.take(timeout=0) is None
        tell(before=answers())
        version = weights.take(timeout=PATIENCE_S)
        tell(version=version, label=llm.get_weight_version(), after=answers())


async def online(model: str, tell: Any) -> None:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from kv_connector.vllm.weights.serving import serve_weights

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, **SETTINGS))
    controller = await serve_weights(engine)

    async def stream(name: str, given: list[int], length: int) -> AsyncIterator[list[int]]:
        prompts = {"prompt_token_ids": given}
        async for output in engine.generate(prompts, parameters(length), request_id=name):
            yield list(output.outputs[0].token_ids)

    async def answers(when: str) -> list[list[int]]:
        async def answer(number: int, tokens: int) -> list[int]:
            return [found async for found in stream(f"{when} {number}", prompt(number, tokens), TOKENS)][-1]

        return await asyncio.gather(*(answer(*one) for one in PROMPTS))

    tell(before=await answers("before"))
    # The test pushes now, while this stream runs.
    version, at, said = "", 0, list[int]()
    async for said in stream("long", prompt(*STREAMED), LONG):
        if not version and (label := await engine.get_weight_version()) != "default":
            version, at = label, len(said)
    label = await engine.get_weight_version()
    tell(version=version, label=label, after=await answers("after"), at=at, said=said)
    controller.close()
    engine.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
