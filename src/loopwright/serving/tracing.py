"""What becomes of a request, as OpenTelemetry spans: HTTP request > generate > stage > step.

    spans = JobSpans(asyncio.get_running_loop())           # below the request's span, which is FastAPI's
    Job(model, request, listener=spans.also(listener))

Where the process has no tracer provider nothing is recorded, and listeners are called as they are. Deliberately absent:
the SDK, exporters and sampling, which are the choice of who runs the server, and prompts, which are nobody's business.
"""

import asyncio
import time

from opentelemetry import trace
from opentelemetry.trace import Span, Status, StatusCode

from ..engine.events import Cancelled, Done, Event, Failed, Started, Stepped
from ..engine.job import Job, Listener

_tracer = trace.get_tracer("loopwright")
_TOLD = (Started, Stepped, Done, Failed, Cancelled)


def current_trace() -> str | None:
    """The id of the trace that is gone on with now, as log lines give it; None where nothing is recorded."""
    span = trace.get_current_span()
    return f"{span.get_span_context().trace_id:032x}" if span.is_recording() else None


class JobSpans:
    """The span of a job from now on, and those of its stages and steps as they happen."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._whole = _tracer.start_span("generate")
        self._stage: Span | None = None

    def also(self, listener: Listener) -> Listener:
        """A listener that tells the spans as well. They are written on the event loop, not on the engine's thread."""
        if not self._whole.is_recording():
            return listener

        def listen(event: Event) -> None:
            listener(event)
            if isinstance(event, _TOLD):
                self._loop.call_soon_threadsafe(self._hear, event, time.time_ns())

        return listen

    def of(self, job: Job) -> None:
        """Say what the job is."""
        request = job.request
        self._whole.set_attributes(
            {
                "loopwright.job": job.id,
                "loopwright.model": request.model,
                "loopwright.task": request.task,
                "loopwright.size": f"{request.width}x{request.height}x{request.num_frames}",
                "loopwright.mode": request.mode,
            }
        )

    def fail(self, error: BaseException) -> None:
        """There will be no job."""
        self._end(time.time_ns(), Status(StatusCode.ERROR, type(error).__name__))

    def _hear(self, event: Event, at: int) -> None:
        match event:
            case Started():
                self._leave(at)
                inside = trace.set_span_in_context(self._whole)
                self._stage = _tracer.start_span(event.stage, inside, start_time=at)
            case Stepped() if self._stage is not None:
                self._step(event, self._stage, at)
            case Failed():
                self._end(at, Status(StatusCode.ERROR, type(event.error).__name__))
            case Cancelled():
                self._whole.set_attribute("loopwright.cancelled", True)
                self._end(at, Status(StatusCode.UNSET))
            case Done():
                self._end(at, Status(StatusCode.OK))

    def _step(self, event: Stepped, stage: Span, at: int) -> None:
        begun = at - round(event.seconds * 1e9)
        attributes = {"loopwright.step": event.index, "loopwright.steps": event.total}
        inside = trace.set_span_in_context(stage)
        _tracer.start_span("step", inside, start_time=begun, attributes=attributes).end(at)

    def _leave(self, at: int) -> None:
        if self._stage is not None:
            self._stage.end(at)
            self._stage = None

    def _end(self, at: int, status: Status) -> None:
        self._leave(at)
        self._whole.set_status(status)
        self._whole.end(at)
