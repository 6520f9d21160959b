"""A child process that answers over HTTP, and its metrics."""

import urllib.request
from abc import abstractmethod

from prometheus_client.parser import text_string_to_metric_families

from kv_connector.lab.process import Process


class Served(Process):
    """An engine or a server with a URL."""

    @property
    @abstractmethod
    def url(self) -> str: ...

    def metric(self, name: str) -> float:
        """Returns the sum of a metric over all its label values; 0 if /metrics does not have it (yet)."""
        return sum(value for _, value in self.samples(name))

    def samples(self, name: str) -> list[tuple[dict[str, str], float]]:
        """Returns (labels, value) of each sample of `name`, as /metrics spells it (counters: _total)."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as response:
            text = response.read().decode()
        return [
            (sample.labels, sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name
        ]
