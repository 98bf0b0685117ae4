"""What is counted, for Prometheus. Every server has a registry of its own."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ..engine.execute import Call, Executor
from ..engine.instance import Instance
from ..loop import Tensors

_SECONDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
Reading = Callable[[], float]


class Metrics:
    """`readings` are taken when somebody looks: each by its name, which ends in _total if it only grows, with what it
    is.
    """

    def __init__(self, readings: Mapping[str, tuple[str, Reading]]) -> None:
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(_Readings(readings))

        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"loopwright_{name}", what, labels, registry=registry)

        def histogram(name: str, what: str, *labels: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(f"loopwright_{name}", what, labels, registry=registry, buckets=buckets)

        self.requests = counter("requests", "HTTP requests", "method", "route", "status")
        self.seconds = histogram("request_seconds", "Of an HTTP request", "route")
        self.jobs = counter("jobs", "Jobs by how they ended", "model", "status")
        self.failures = counter("failures", "Jobs that failed, by the code that clients are told", "model", "kind")
        self.cancels = counter("cancels", "Jobs cancelled: asked for, deadline passed, client left", "model", "reason")
        self.stages = histogram("stage_seconds", "Of a job's stage, by its steps", "model", "stage")
        self.rows = histogram("call_rows", "Rows of a call of the model", "model", "unit", buckets=_ROWS)

    def counting(self, execute: Executor) -> Executor:
        """An executor that counts what it is asked to execute."""

        def run(model: Instance, call: Call) -> Tensors:
            self.rows.labels(model.card.name, call.step.unit.value).observe(call.rows)
            return execute(model, call)

        return run

    def text(self) -> bytes:
        """In Prometheus' format."""
        return generate_latest(self._registry)


class _Readings(Collector):
    def __init__(self, readings: Mapping[str, tuple[str, Reading]]) -> None:
        self._readings = readings

    def collect(self) -> Iterator[Metric]:
        for name, (what, read) in self._readings.items():
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            yield kind(f"loopwright_{name}", what, value=read())
