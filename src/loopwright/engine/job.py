"""A request under way: its stage, the loop's state, the slots written so far. `step` runs at most one step.

Everything a job holds is in `slots` and `state`; ending it in any way drops both.
"""

import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ..caches.feature import content
from ..errors import ModelError, StateError
from ..loop import Key, Result, Step, Tensors, Unit, Wait, key_of
from ..program import Bound, bind
from ..request import Request
from .env import RequestEnv
from .events import Artifact, Cancelled, Done, Event, Failed, Queued, Started, Stepped
from .instance import Instance

Listener = Callable[[Event], None]


class Observer(Protocol):
    """Sees every step of a job after it ran: for parity, traces and capture. Must not change what it sees."""

    def on_step(self, job: "Job", step: Step, key: Key, result: Result) -> None: ...


@dataclass(frozen=True, slots=True)
class Pending:
    """A step that can run now: its key, and the tensors its handles stand for, by argument."""

    step: Step
    key: Key
    lent: Tensors

    def run(self, model: Instance) -> Tensors:
        """The result for this request alone; embeddings this process has computed before are not computed again."""
        step = self.step
        if step.unit is not Unit.EMBED:
            return self.call(model)
        owner = model.origin(step.uses[0])
        key = (step.op, model.version(step.uses[0]), step.binding, tuple(step.static.items()), content(step.tensors))
        return model.store.features.compute(owner, key, lambda: self.call(model))

    def call(self, model: Instance) -> Tensors:
        """Call the op: the plain twin of every other way to run a step."""
        step = self.step
        handles = {name: (tensor,) for name, tensor in self.lent.items()}
        with torch.no_grad():
            return step.op(model.parts(step.uses), **step.tensors, **handles, **step.static)


class Job:
    """A request on an instance. `status`: queued, running, waiting, done, failed or cancelled."""

    def __init__(
        self, model: Instance, request: Request, *, listener: Listener | None = None, observers: Sequence[Observer] = ()
    ) -> None:
        self.id = uuid.uuid4().hex[:12]
        self.model, self.request = model, request
        self.env = RequestEnv(model, model.bind(request))
        self.stages: tuple[Bound, ...] = bind(model.card, request, model.loops)
        self.stage, self.index = 0, 0
        self.state: object | None = None
        self.slots: dict[str, torch.Tensor] = {}
        self.status = "queued"
        self.waiting_for = ""
        self.output: Tensors | None = None
        self.error: Exception | None = None
        self.seconds = 0.0
        self._outputs = set(model.card.programs[request.task].outputs.values())
        self._started = 0.0
        self._listener, self._observers = listener, tuple(observers)
        self._cancelled = False
        self._emit(Queued(self.id))

    @property
    def ended(self) -> bool:
        """Whether nothing will happen to the job any more."""
        return self.status in ("done", "failed", "cancelled")

    @property
    def runnable(self) -> bool:
        """Whether `step` has something to do: a step to run, or a cancellation to carry out."""
        return self.status != "waiting" or self._cancelled

    def cancel(self) -> None:
        """Ask to stop at the next step boundary. Safe from any thread."""
        self._cancelled = True

    def feed(self, port: str, item: Tensors | None) -> None:
        """Give the current loop an item it may be waiting for; None closes the port."""
        if self.state is None:
            raise StateError("the job is not running", value=self.status)
        self.state = self.stages[self.stage].loop.feed(self.state, port, item)
        self.status, self.waiting_for = "running", ""

    def step(self) -> None:
        """Run one step alone, if there is one. Any error ends this job, and this job alone, with `Failed`."""
        pending = self.pending()
        if pending is not None:
            self.run(pending)

    def run(self, pending: Pending) -> None:
        """Run this job's pending step alone."""
        begun = time.perf_counter()
        try:
            tensors = pending.run(self.model)
        except Exception as error:
            self.fail(error)
        else:
            self.complete(pending, tensors, time.perf_counter() - begun)

    def pending(self) -> Pending | None:
        """The step to run next, with what it needs; None if the job has ended or waits. Stages begin and end here."""
        if self.ended:
            return None
        try:
            self._started = self._started or time.perf_counter()
            if self._cancelled:
                self._end("cancelled", Cancelled(self.id))
                return None
            return self._pending()
        except Exception as error:
            self.fail(error)
            return None

    def complete(self, pending: Pending, tensors: Tensors, seconds: float) -> None:
        """Take the result of `pending`, which took `seconds`."""
        try:
            self._complete(pending.step, pending.key, tensors, seconds)
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """End with this error; running out of memory is told by its stage."""
        if _out_of_memory(error):
            told = ModelError(
                f"out of memory in stage {self.stages[self.stage].stage.name} ({str(error).splitlines()[0]})",
                remedy="ask for a smaller size, fewer frames or a shorter max_sequence_length",
            )
            told.__cause__, error = error, told
        self.error = error
        _detach(error)
        self._end("failed", Failed(self.id, error))

    def _pending(self) -> Pending | None:
        while not self.ended:
            bound = self.stages[self.stage]
            if self.state is None:
                self._begin(bound)
            step = bound.loop.next(self.state)
            if isinstance(step, Wait):
                self._wait(step)
                return None
            if step is not None:
                key = key_of(step, self.model.version, self.slots)
                return Pending(step, key, {name: self.slots[ref.slot] for name, ref in step.handles.items()})
            self._leave(bound)
        return None

    def _complete(self, step: Step, key: Key, tensors: Tensors, seconds: float) -> None:
        begun, bound = time.perf_counter(), self.stages[self.stage]
        result = Result(tensors, {name: tensors[name].tolist() for name in step.reads})
        for observer in self._observers:
            observer.on_step(self, step, key, result)
        total = self.index + sum(count for _, count in bound.loop.outlook(self.state))
        self.state, emitted = bound.loop.advance(self.state, result)
        self.index += 1
        seconds += time.perf_counter() - begun
        self._emit(Stepped(self.id, bound.stage.name, step.unit, self.index, total, seconds))
        if emitted:
            self._emit(Artifact(self.id, bound.stage.name, emitted))

    def _wait(self, wait: Wait) -> None:
        self.status, self.waiting_for = "waiting", wait.port

    def _begin(self, bound: Bound) -> None:
        self.status = "running"
        self._emit(Started(self.id, bound.stage.name))
        inputs = {slot: self.slots[slot] for slot in bound.stage.reads if slot in self.slots}
        self.state, self.index = bound.loop.init(self.request, inputs, self.env), 0

    def _leave(self, bound: Bound) -> None:
        written = bound.loop.finish(self.state)
        if len(bound.stage.writes) == 1:
            written = dict(zip(bound.stage.writes, written.values(), strict=True))
        elif unknown := set(written) - set(bound.stage.writes):
            raise AssertionError(f"stage {bound.stage.name} wrote undeclared slots {sorted(unknown)}")
        self.slots.update(written)
        self.state, self.stage = None, self.stage + 1
        if self.stage == len(self.stages):
            self.output = {slot: tensor for slot, tensor in self.slots.items() if slot in self._outputs}
            self.seconds = time.perf_counter() - self._started
            self._end("done", Done(self.id, self.output, self.seconds))
        else:
            self._drop_unread()

    def _drop_unread(self) -> None:
        """Slots that no later stage reads and that are no output are given back at once."""
        read = {name for bound in self.stages[self.stage :] for name in bound.stage.reads} | self._outputs
        self.slots = {name: tensor for name, tensor in self.slots.items() if name in read}

    def _end(self, status: str, event: Event) -> None:
        self.status, self.state, self.slots, self.waiting_for = status, None, {}, ""
        self._emit(event)

    def _emit(self, event: Event) -> None:
        if self._listener is not None:
            try:
                self._listener(event)
            except Exception:
                self._listener = None  # it ends this job once; telling it of that would end the runner as well
                raise


def _out_of_memory(error: Exception) -> bool:
    """On CUDA torch says it by type, on the CPU by words."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "allocate memory" in str(error)
    )


def _detach(error: BaseException) -> None:
    """A traceback keeps alive every variable of its frames and of their callers': it stays as text alone."""
    error.add_note("".join(traceback.format_exception(error)).rstrip())
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
