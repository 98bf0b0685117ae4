"""What is counted, for Prometheus. Every server has a registry of its own."""

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

_SECONDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


Reading = Callable[[], float]


class Metrics:
    """`readings` are taken when somebody looks: each by its name, with what it is."""

    def __init__(self, readings: Mapping[str, tuple[str, Reading]]) -> None:
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.requests = Counter(
            "loopwright_requests", "HTTP requests", ["method", "route", "status"], registry=registry
        )
        self.seconds = Histogram(
            "loopwright_request_seconds", "Of an HTTP request", ["route"], registry=registry, buckets=_SECONDS
        )
        self.jobs = Counter("loopwright_jobs", "Jobs by how they ended", ["model", "status"], registry=registry)
        self.stages = Histogram(
            "loopwright_stage_seconds",
            "Of a job's stage, by its steps",
            ["model", "stage"],
            registry=registry,
            buckets=_SECONDS,
        )
        for name, (what, read) in readings.items():
            Gauge(f"loopwright_{name}", what, registry=registry).set_function(read)

    def text(self) -> bytes:
        """In Prometheus' format."""
        return generate_latest(self._registry)
