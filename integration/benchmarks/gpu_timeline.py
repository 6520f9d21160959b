#!/usr/bin/env python3
"""Records one request's timeline on GPUs, for docs/data: its layers computed, and landed.

    gpu_timeline.py TRACE [--tokens N] [--logs DIR] [--gpus 0 1]

A prefill and a decode engine of a Llama of 8 billion random weights run on the GPUs named (one GPU may hold
both). Three requests of N tokens go through both. TRACE receives the last request, as `kv-connector trace`
writes it. Exits with 1 if a request fails or its prompt is computed at the decode engine. Needs vLLM and this
package. `--tiny` tries the program on CPUs.
"""

# ruff: noqa: T201  (its output is a line for a person)

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from shapes import SHAPES, ModelShape

ROOT = Path(__file__).resolve().parents[2]
HOST = "127.0.0.1"
CONTROL_PORTS = {"kv_producer": 25600, "kv_consumer": 25700}
REQUESTS = 3
"""The first request connects the engines, and vLLM compiles for its shape."""
START_SECONDS = 240.0
REQUEST_SECONDS = 60.0

TINY = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
TINY |= {"intermediate_size": 256, "head_dim": 32, "vocab_size": 512}


@dataclass(frozen=True)
class TimelineSide:
    """One engine: its role, its model's folder and the GPU on which it runs (None: CPUs)."""

    role: str
    model: str
    gpu: int | None
    log: str


# --- in an engine's process ---


def serve(side: TimelineSide, parent: Connection) -> None:
    """Starts an engine, then answers the parent's requests: (prompt, tokens, kv_transfer_params)."""
    log = os.open(side.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        engine, vllm = start(side)
        parent.send(None)
        while True:
            prompt, tokens, transfer = parent.recv()
            parameters = vllm.SamplingParams(
                temperature=0.0,
                max_tokens=tokens,
                ignore_eos=True,
                detokenize=False,
                extra_args={"kv_transfer_params": transfer},
            )
            (answer,) = engine.generate([{"prompt_token_ids": prompt}], parameters, use_tqdm=False)
            parent.send(list(answer.outputs[0].token_ids))
    except EOFError:  # the parent is done
        engine.llm_engine.engine_core.shutdown()
    except BaseException as error:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        with contextlib.suppress(OSError):
            parent.send(f"{type(error).__name__}: {error}")
    os._exit(0)


def start(side: TimelineSide) -> tuple[Any, Any]:
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1"}
    settings: dict[str, Any] = {"max_model_len": 65536, "gpu_memory_utilization": 0.4}
    if side.gpu is None:
        os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        settings = {"max_model_len": 4096, "kv_cache_memory_bytes": 256 << 20, "enforce_eager": True}
    else:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[side.gpu] if visible else str(side.gpu)
    import vllm

    extra = {"control_host": HOST, "control_port": CONTROL_PORTS[side.role], "timelines": 10}
    extra |= {"providers": ["host"] if side.gpu is None else ["nvlink"]}
    engine = vllm.LLM(
        model=side.model,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32" if side.gpu is None else "bfloat16",
        enable_prefix_caching=False,
        kv_transfer_config={
            "kv_connector": "WriteImmConnector",
            "kv_connector_module_path": "kv_connector.vllm.connector",
            "kv_role": side.role,
            "kv_connector_extra_config": extra,
        },
        **settings,
    )
    return engine, vllm


# --- in the parent ---


@contextlib.contextmanager
def engines(sides: Sequence[TimelineSide]) -> Iterator[list[Connection]]:
    """The engines, started one after the other: vLLM measures the memory that is free."""
    context = multiprocessing.get_context("spawn")
    started, links = [], []
    try:
        for side in sides:
            link, theirs = context.Pipe()
            # Not a daemon, because vLLM starts child processes.
            process = context.Process(target=serve, args=(side, theirs))
            process.start()
            theirs.close()
            started.append(process)
            links.append(link)
            answer(link, side.log, START_SECONDS)
        yield links
    finally:
        for link in links:
            link.close()
        for process in started:
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()


def answer(link: Connection, log: str, seconds: float) -> Any:
    if not link.poll(seconds):
        raise SystemExit(f"gpu_timeline: no answer within {seconds:g} s: {log}")
    try:
        found = link.recv()
    except EOFError:
        raise SystemExit(f"gpu_timeline: an engine ended: {log}") from None
    if isinstance(found, str):
        raise SystemExit(f"gpu_timeline: {found}: {log}")
    return found


def request(
    links: Sequence[Connection], sides: Sequence[TimelineSide], number: int, prompt: list[int]
) -> float:
    """One request through both engines, dispatched to both at once. Returns the seconds until its token."""
    transfer = {"transfer_id": f"timeline-{number}"}
    producing = {"do_remote_decode": True, "do_remote_prefill": False, **transfer}
    consuming = {"do_remote_prefill": True, "do_remote_decode": False, **transfer}
    consuming |= {"remote_host": HOST, "remote_port": CONTROL_PORTS["kv_producer"]}
    begin = time.monotonic()
    links[0].send((prompt, 1, producing))
    links[1].send((prompt, 2, consuming))
    for link, side in zip(links, sides, strict=True):
        answer(link, side.log, REQUEST_SECONDS)
    return time.monotonic() - begin


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--gpus", type=int, nargs=2, default=(0, 0), metavar=("PREFILL", "DECODE"))
    parser.add_argument("--logs", type=Path, default=Path("/tmp/gpu_timeline"))
    parser.add_argument("--tiny", action="store_true", help="A small model on CPUs.")
    arguments = parser.parse_args()
    arguments.logs.mkdir(parents=True, exist_ok=True)
    sys.path.append(str(ROOT))
    from kv_connector.cli.trace import chrome_trace
    from kv_connector.control.timelines import ask_workers
    from kv_connector.protocol.actions import Address

    with tempfile.TemporaryDirectory() as directory:
        shape = SHAPES["llama"]
        if arguments.tiny:
            shape = ModelShape({**shape.model, **TINY})
        shape.write(Path(directory))
        vocabulary = TINY["vocab_size"] if arguments.tiny else 128256
        sides = [
            TimelineSide(
                role, directory, None if arguments.tiny else gpu, str(arguments.logs / f"{role}.log")
            )
            for role, gpu in zip(CONTROL_PORTS, arguments.gpus, strict=True)
        ]
        draw = random.Random(0)
        with engines(sides) as links:
            for number in range(REQUESTS):
                prompt = [draw.randrange(1, vocabulary) for _ in range(arguments.tokens)]
                seconds = request(links, sides, number, prompt)
                print(f"request {number}: {arguments.tokens} tokens, {seconds * 1e3:.0f} ms until two tokens")
            addresses = [Address(HOST, port) for port in CONTROL_PORTS.values()]
            workers = ask_workers(addresses, None, f"timeline-{REQUESTS - 1}", 1, 10.0)
    trace = chrome_trace(workers)
    landed = sum(event["name"] == "landed" for event in trace["traceEvents"])
    if not landed:
        print("gpu_timeline: no page landed: the decode engine computed the prompt itself")
        return 1
    arguments.trace.write_text(json.dumps(trace) + "\n")
    print(f"{arguments.trace}: {landed} layers landed")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
