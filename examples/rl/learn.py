"""A model learns to sort digits by reinforcement learning: vLLM answers, and two ranks under FSDP2 learn.

The weights of each step are written into the engine before the next prompts.

    python examples/rl/learn.py [PICTURE.svg]
"""

import importlib.util
import json
import multiprocessing
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean

try:
    import torch
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from kv_connector.lab import plots
    from kv_connector.lab.cluster import HOST, MODEL_NAME, EngineSettings, LocalCluster
    from kv_connector.lab.free_ports import free_ports
    from kv_connector.lab.model import write_tokenizer
    from kv_connector.lab.process import leave_on_signals
    from kv_connector.weights.pusher import WeightPusher
    from kv_connector.weights.sources import module_source
except ImportError as error:
    sys.exit(f"{error}: `make setup` installs what this example needs")

RANKS = 2

# A prompt is DIGITS digits and EQUALS. The right answer is the same digits in order.
DIGITS, RADIX, EQUALS = 4, 10, 10
PROMPTS, GROUP = 32, 8  # prompts of a rank per step, and answers per prompt

# Steps in which the share of right digits grows from one in twenty to nine in ten (0.88 to 0.95 in five
# runs).
STEPS = 120
LEARNING_RATE = 3e-3  # falls to 0
ENTROPY = 0.1  # with 0.03 it settles too early, at 0.6, on digits that are often right
LEARNT = 0.8
TEN = 10  # steps per printed line

# Two programs that compute the same in float32 differ by 5e-6 at most. A step of training moves logprobs by
# 0.1 to 4.
SAME = 1e-3


def make_model(directory: Path) -> None:
    """Writes a model with 70,000 random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # vLLM's minimum on CPUs
        max_position_embeddings=64,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=None,
    )
    disable_progress_bar()
    LlamaForCausalLM(config).save_pretrained(directory)
    write_tokenizer(directory)  # vLLM requires one; prompts and answers are token ids


# --- Questions and answers


@dataclass(frozen=True)
class Samples:
    prompts: torch.Tensor  # as many as answers: each prompt occurs GROUP times
    answers: torch.Tensor
    logprobs: torch.Tensor  # of the answers' tokens, from the engine


def sample(url: str, prompts: torch.Tensor) -> Samples:
    """Draws GROUP answers to each prompt with the engine's present weights."""
    body = {
        "model": MODEL_NAME,
        "prompt": prompts.tolist(),
        "n": GROUP,
        "max_tokens": DIGITS,
        "temperature": 1,
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        choices = sorted(json.load(response)["choices"], key=lambda choice: int(choice["index"]))
    return Samples(
        prompts.repeat_interleave(GROUP, 0),
        torch.tensor([choice["token_ids"] for choice in choices]),
        torch.tensor([choice["logprobs"]["token_logprobs"] for choice in choices]),
    )


def draw_prompts(generator: torch.Generator) -> torch.Tensor:
    digits = torch.randint(RADIX, (PROMPTS, DIGITS), generator=generator)
    return torch.cat([digits, torch.full((PROMPTS, 1), EQUALS)], 1)


def rewards(samples: Samples) -> torch.Tensor:
    """Returns the reward of each token: 1 if it is the right digit of its place, else 0."""
    ordered = samples.prompts[:, :DIGITS].sort(1).values
    return (samples.answers == ordered).float()


def advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Returns each token's reward relative to the tokens in its place of the prompt's other answers."""
    groups = rewards.view(-1, GROUP, rewards.shape[1])
    return (groups - groups.mean(1, keepdim=True)).view_as(rewards)


# --- A rank of the trainer


@dataclass(frozen=True)
class Step:
    reward: float
    difference: float  # the largest difference between the engine's logprobs and the trainer's
    push_ms: float  # until all weights have landed beside the served ones
    pause_ms: float  # from then until they are served
    example: tuple[list[int], list[int]]  # a prompt and an answer


def train(rank: int, model: Path, url: str, takes: str, store: Path, steps: Connection) -> None:
    """Runs one rank. The first rank reports each step."""
    torch.set_num_threads(1)
    disable_progress_bar()
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=RANKS)
    policy = LlamaForCausalLM.from_pretrained(model)
    for layer in policy.model.layers:
        fully_shard(layer)
    fully_shard(policy)
    optimizer = torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, STEPS)
    generator = torch.Generator().manual_seed(rank)
    with WeightPusher(module_source(policy), [takes]) as pusher:
        pusher.connect()
        for number in range(STEPS):
            samples = sample(url, draw_prompts(generator))
            reward = rewards(samples)
            difference = learn(policy, samples, advantages(reward))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

            began = time.perf_counter()
            update = pusher.push(f"step-{number + 1}")
            update.wait("landed")
            landed = time.perf_counter()
            update.wait("applied")
            applied = time.perf_counter()

            if rank == 0:
                example = samples.prompts[0, :DIGITS].tolist(), samples.answers[0].tolist()
                push_ms, pause_ms = (landed - began) * 1e3, (applied - landed) * 1e3
                steps.send(Step(reward.mean().item(), difference, push_ms, pause_ms, example))
    torch.distributed.destroy_process_group()


def learn(policy: torch.nn.Module, samples: Samples, advantages: torch.Tensor) -> float:
    """Computes the gradients.

    Returns the largest difference between the policy's logprobs and the engine's.
    """
    tokens = torch.cat([samples.prompts, samples.answers], 1)
    logits = policy(tokens[:, :-1]).logits[:, -DIGITS:]
    every = logits.log_softmax(-1)
    logprobs = every.gather(-1, samples.answers.unsqueeze(-1)).squeeze(-1)
    entropy = -(every.exp() * every).sum(-1).mean()
    (-(advantages * logprobs).mean() - ENTROPY * entropy).backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    return (logprobs.detach() - samples.logprobs).abs().max().item()


# --- The whole example


def show(cluster: LocalCluster) -> list[Step]:
    port, _ = free_ports(2)
    engine = cluster.start_engine(
        "engine",
        settings=EngineSettings(
            max_model_len=64,
            max_seqs=PROMPTS * GROUP * RANKS,
            arguments=("--weight-transfer-config", '{"backend": "write_imm"}'),
            environment={
                "VLLM_PLUGINS": "kv_connector",
                "KV_CONNECTOR_WEIGHTS": json.dumps({"control_host": HOST, "control_port": port}),
            },
        ),
    )
    cluster.wait_ready()
    spawn = multiprocessing.get_context("spawn")
    told, tells = spawn.Pipe(duplex=False)
    arguments = (cluster.model, engine.url, f"{HOST}:{port}", cluster.directory / "store", tells)
    ranks = [spawn.Process(target=train, args=(rank, *arguments), daemon=True) for rank in range(RANKS)]
    # Only this process handles Ctrl-C, and the ranks end with it.
    ours = signal.signal(signal.SIGINT, signal.SIG_IGN)
    for process in ranks:
        process.start()
    signal.signal(signal.SIGINT, ours)
    tells.close()

    steps: list[Step] = []
    print(f"{'step':>4} {'reward':>7} {'push ms':>8} {'pause ms':>9} {'difference':>11}  an answer")
    try:
        while len(steps) < STEPS:
            steps.append(told.recv())
            if len(steps) == 1 or len(steps) % TEN == 0:
                say(len(steps), steps[-1])
        for process in ranks:
            process.join()
    except EOFError:
        words = f"the trainer ended in step {len(steps) + 1}, and says why above"
        sys.exit(f"{words}; the engine's log ends:\n{engine.log_tail()}")
    finally:
        for process in ranks:
            process.kill()  # if it was interrupted
    return steps


def say(number: int, step: Step) -> None:
    prompt, answer = (" ".join(map(str, digits)) for digits in step.example)
    print(
        f"{number:4} {step.reward:7.2f} {step.push_ms:8.1f} {step.pause_ms:9.1f} {step.difference:11.1e}"
        f"  {prompt} = {answer}",
        flush=True,
    )


def plot(file: Path, steps: Sequence[Step]) -> None:
    columns = [str(last) for last in range(TEN, STEPS + 1, TEN)]

    def means(name: str, values: Sequence[float]) -> plots.Series:
        return plots.Series(name, [fmean(values[first : first + TEN]) for first in range(0, STEPS, TEN)])

    reward = means("reward", [step.reward for step in steps])
    push = means("push", [step.push_ms for step in steps])
    pause = means("pause", [step.pause_ms for step in steps])
    panels = [
        plots.Panel("Reward", columns, [reward], "share of right digits", "step"),
        plots.Panel("New weights", columns, [push, pause], "ms", "step"),
    ]
    plots.lines(file, panels, "Means of ten steps")


def main(picture: Path) -> None:
    if importlib.util.find_spec("vllm") is None:
        sys.exit("no vLLM in this environment: `make setup` installs it")
    try:
        plots.check(picture)
    except plots.PlotError as error:
        sys.exit(str(error))
    with leave_on_signals(), tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        make_model(directory / "model")
        with LocalCluster(directory, directory / "model") as cluster:
            steps = show(cluster)
    plot(picture, steps)
    first, last = (fmean(step.reward for step in ten) for ten in (steps[:TEN], steps[-TEN:]))
    print(f"reward {first:.2f} in the first ten steps, {last:.2f} in the last ten; drawn in {picture}")
    if last < LEARNT:
        sys.exit(f"it has not learnt to sort: {last:.2f} of the digits are right, {LEARNT} should be")
    if (difference := max(step.difference for step in steps)) > SAME:
        sys.exit(f"the engine did not serve the trainer's weights: logprobs differ by {difference:.1e}")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else "rl.svg"))
    except KeyboardInterrupt:
        sys.exit("stopped")
