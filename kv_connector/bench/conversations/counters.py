"""The growth of engines' and routers' counters during a run, from their Prometheus metrics."""

import asyncio
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from kv_connector.bench.conversations.results import EngineGrowth, Prediction

# An engine sends its numbers with its next step, and a router with the next message of an engine. After two
# equal readings the counters have settled.
SETTLE_SECONDS, MOST_READINGS = 0.5, 10
_READ_SECONDS = 10.0
_MAX_BYTES = 32 << 20
# Labels that vLLM 0.32 and 0.33 give to the sources of prompt tokens.
_BY_SOURCE = "vllm:prompt_tokens_by_source_total"
_USED = "vllm:prompt_tokens", "vllm:request_success", "vllm:generation_tokens", "kv_connector_"
_PREDICTIONS = re.compile(r"predicted|actual|confirmed|borrowed")

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
"""{(name, labels): value}"""


@dataclass(frozen=True)
class MetricsSource:
    """A server with metrics."""

    name: str
    url: str
    """Address of its metrics page."""

    @property
    def side(self) -> str:
        """The name without the number at its end, and the separator before it."""
        return re.sub(r"[-_ .]?\d+$", "", self.name) or self.name


@dataclass(frozen=True)
class Reading:
    """The samples of one page, or the reason for having none."""

    samples: Samples
    problem: str = ""


async def read_all(http: aiohttp.ClientSession, sources: Sequence[MetricsSource]) -> list[Reading]:
    return list(await asyncio.gather(*(_read(http, source) for source in sources)))


async def read_settled(http: aiohttp.ClientSession, sources: Sequence[MetricsSource]) -> list[Reading]:
    """Reads until two readings have equal counters, or at most MOST_READINGS times."""
    readings = await read_all(http, sources)
    for _ in range(MOST_READINGS - 1):
        await asyncio.sleep(SETTLE_SECONDS)
        before, readings = readings, await read_all(http, sources)
        if all(_counters(one) == _counters(other) for one, other in zip(before, readings, strict=True)):
            break
    return readings


def _counters(reading: Reading) -> Samples:
    """Returns the samples that `engine` and `predictions` use."""
    return {
        key: value
        for key, value in reading.samples.items()
        if key[0].startswith(_USED) and key[0].endswith("_total")
    }


async def _read(http: aiohttp.ClientSession, source: MetricsSource) -> Reading:
    try:
        async with http.get(source.url, timeout=aiohttp.ClientTimeout(total=_READ_SECONDS)) as response:
            if response.status != 200:
                return Reading({}, f"{source.url} answered {response.status}")
            raw = bytearray()
            async for some in response.content.iter_any():
                raw += some
                if len(raw) > _MAX_BYTES:
                    return Reading({}, f"{source.url} sent more than {_MAX_BYTES >> 20} MiB")
        return Reading(dict(_samples(raw.decode(errors="replace"))))
    except TimeoutError:
        return Reading({}, f"{source.url} did not answer within {_READ_SECONDS:g} s")
    except (aiohttp.ClientError, OSError) as error:
        return Reading({}, f"{source.url}: {error or type(error).__name__}")
    except ValueError as error:
        return Reading({}, f"{source.url} is not a Prometheus page: {error}")


def _samples(text: str) -> Iterator[tuple[tuple[str, frozenset[tuple[str, str]]], float]]:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            yield (sample.name, frozenset(sample.labels.items())), sample.value


def engine(source: MetricsSource, before: Reading, after: Reading) -> EngineGrowth:
    """Returns the growth of an engine's counters."""
    problem = before.problem or after.problem
    if not problem and any(value < before.samples.get(key, 0.0) for key, value in _counters(after).items()):
        problem = f"{source.url}: a counter fell. The engine restarted during the run"
    if not problem and not any(name.startswith(("vllm:", "kv_connector_")) for name, _ in after.samples):
        problem = f"{source.url} has no metrics of vLLM or kv-connector"
    if problem:
        return EngineGrowth(name=source.name, side=source.side, problem=problem)

    def grown(name: str, **labels: str) -> int | None:
        return _grown(before.samples, after.samples, name, labels)

    prompt = grown("vllm:prompt_tokens_total")
    computed = grown(_BY_SOURCE, source="local_compute")
    if computed is None:
        cached = grown("vllm:prompt_tokens_cached_total")
        computed = None if prompt is None or cached is None else prompt - cached
    return EngineGrowth(
        name=source.name,
        side=source.side,
        requests=grown("vllm:request_success_total"),
        prompt_tokens=prompt,
        computed_tokens=computed,
        local_hit_tokens=grown(_BY_SOURCE, source="local_cache_hit"),
        transferred_tokens=grown(_BY_SOURCE, source="external_kv_transfer"),
        answer_tokens=grown("vllm:generation_tokens_total"),
        bytes_pushed=grown("kv_connector_bytes_pushed_total"),
    )


def _grown(before: Samples, after: Samples, name: str, labels: Mapping[str, str]) -> int | None:
    """Returns the growth of a counter, summed over all samples with these labels; None: it has none."""
    wanted = labels.items()
    keys = [key for key in after if key[0] == name and wanted <= key[1]]
    return round(sum(after[key] - before.get(key, 0.0) for key in keys)) if keys else None


def predictions(source: MetricsSource, before: Reading, after: Reading) -> Iterator[Prediction]:
    """Yields the growth of a router's counters of predicted and actual hits, if it has any."""
    if before.problem:
        return
    for (name, labels), value in sorted(after.samples.items(), key=_order):
        if (
            name.startswith("kv_connector_router_")
            and name.endswith("_total")
            and any(_PREDICTIONS.search(text) for text in (name, *(value for _, value in labels)))
        ):
            yield Prediction(
                endpoint=source.name,
                name=name,
                labels=dict(sorted(labels)),
                tokens=value - before.samples.get((name, labels), 0.0),
            )


def _order(item: tuple[tuple[str, frozenset[tuple[str, str]]], float]) -> tuple[str, list[tuple[str, str]]]:
    (name, labels), _ = item
    return name, sorted(labels)
