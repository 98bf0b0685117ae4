"""Metrics of several servers as one text, each line with its server's name: `{replica="replica-0"}`.

labelled({"replica-0": text, "replica-1": text})
"""

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families as families
from prometheus_client.registry import Collector


class _Together(Collector):
    """What replicas tell, by name."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts

    def collect(self) -> Iterable[Metric]:
        found: dict[str, Metric] = {}
        for replica, text in self._texts.items():
            for family in families(text):
                known = found.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    labels = {**sample.labels, "replica": replica}
                    known.add_sample(sample.name, labels, sample.value, sample.timestamp)
        return found.values()


def labelled(texts: Mapping[str, str]) -> bytes:
    """In Prometheus' format, by replica."""
    registry = CollectorRegistry()
    registry.register(_Together(texts))
    return generate_latest(registry)
