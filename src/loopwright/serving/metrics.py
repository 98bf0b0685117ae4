"""What is counted, for Prometheus. Every server has a registry of its own."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

_SECONDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """`under_way` and `scheduled` are asked when somebody looks."""

    def __init__(self, under_way: Callable[[], float], scheduled: Callable[[], float]) -> None:
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
        for name, help, read in (
            ("loopwright_requests_under_way", "Images and videos accepted and not ended", under_way),
            ("loopwright_jobs_scheduled", "Jobs that the engine has", scheduled),
        ):
            Gauge(name, help, registry=registry).set_function(read)

    def text(self) -> bytes:
        """In Prometheus' format."""
        return generate_latest(self._registry)
