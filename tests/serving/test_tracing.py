"""What a request's spans say, by OpenTelemetry's own SDK; and that nothing is done where nobody records."""

import asyncio
import logging
import time
from collections.abc import Callable

import pytest
from live import SMALL
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from loopwright.serving.tracing import JobSpans

PARENT, TRACE = "00f067aa0ba902b7", "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture
def exported(monkeypatch) -> InMemorySpanExporter:
    """What ends from now on, as a process with an SDK would export it."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)  # which a process can set only once
    monkeypatch.setattr("loopwright.serving.tracing._tracer", provider.get_tracer("loopwright"))
    return exporter


def soon(find: Callable[[], list]) -> list:
    """What is found, which may be a moment after the client has its answer."""
    until = time.monotonic() + 10
    while not (found := find()) and time.monotonic() < until:
        time.sleep(0.01)
    return found


def spans_of(exporter, trace_id: str) -> list:
    found = [span for span in exporter.get_finished_spans() if f"{span.context.trace_id:032x}" == trace_id]
    return sorted(found, key=lambda span: span.start_time)


def test_an_image_is_a_request_with_stages_and_their_steps(server, exported):
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-ID": "here"}
    answer = server.http.post("/v1/images/generations", json=SMALL | {"prompt": "a secret"}, headers=headers)
    assert answer.status_code == 200
    wanted = ("POST /v1/images/generations", "generate", "denoise", "step")

    def named() -> dict[str, list]:
        return {name: [span for span in spans_of(exported, TRACE) if span.name == name] for name in wanted}

    soon(lambda: [named()] if all(named().values()) else [])
    spans = named()
    (asked,), (job,), (denoise,) = spans["POST /v1/images/generations"], spans["generate"], spans["denoise"]
    assert f"{asked.parent.span_id:016x}" == PARENT and asked.kind is trace.SpanKind.SERVER
    assert asked.attributes["http.response.status_code"] == 200
    assert job.parent.span_id == asked.context.span_id and denoise.parent.span_id == job.context.span_id
    assert job.status.status_code is trace.StatusCode.OK
    assert (job.attributes["loopwright.task"], job.attributes["loopwright.size"]) == ("text_to_video", "32x32x1")
    steps = [span for span in spans["step"] if span.parent.span_id == denoise.context.span_id]
    assert [step.attributes["loopwright.step"] for step in steps] == [1, 2, 3]
    assert all(asked.start_time <= job.start_time <= span.start_time for span in (denoise, *steps))
    assert all(step.end_time <= denoise.end_time <= job.end_time for step in steps)
    assert "secret" not in "".join(span.to_json() for span in exported.get_finished_spans())


def test_a_video_goes_on_with_the_trace_of_who_asked_for_it(server, exported):
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    body = SMALL | {"prompt": "a fox", "num_frames": 5}
    video = server.http.post("/v1/videos", json=body, headers=headers).json()
    server.openai.videos.poll(video["id"], poll_interval_ms=20)
    wanted = {"POST /v1/videos", "generate", "text", "denoise", "decode", "step"}

    def names() -> set[str]:
        return {span.name for span in spans_of(exported, TRACE)}

    soon(lambda: [names()] if wanted <= names() else [])
    assert wanted <= names()


def test_what_fails_and_what_is_refused_is_told_by_its_span(server, exported):
    server.http.post("/v1/images/generations", json={"prompt": "a", "nobody": 1})
    (refused,) = soon(exported.get_finished_spans)
    assert refused.attributes["http.response.status_code"] == 400
    assert refused.status.status_code is trace.StatusCode.UNSET  # the client's fault is none of ours
    exported.clear()
    body = SMALL | {"prompt": "a fox", "deadline": 0.001, "num_inference_steps": 100}
    assert server.http.post("/v1/images/generations", json=body).status_code == 422
    (job,) = soon(lambda: [span for span in exported.get_finished_spans() if span.name == "generate"])
    assert job.attributes["loopwright.cancelled"]


def test_a_line_of_the_log_names_the_trace(server, exported, caplog):
    caplog.set_level(logging.INFO, logger="loopwright.serving")
    server.http.get("/v1/models", headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    (record,) = soon(lambda: [record for record in caplog.records if record.name == "loopwright.serving"])
    assert record.fields["trace_id"] == TRACE
    server.http.get("/v1/models")
    (alone,) = soon(lambda: [span for span in exported.get_finished_spans() if span.parent is None])
    assert alone.name == "GET /v1/models"


def test_without_a_provider_a_job_is_listened_to_as_it_was():
    async def run() -> None:
        listener = list.append
        assert JobSpans(asyncio.get_running_loop()).also(listener) is listener

    asyncio.run(run())
