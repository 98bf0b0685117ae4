"""A request under way: its stage, the loop's state, the slots written so far. `step` runs at most one step.

Everything a job holds is in `slots`, `state` and `leases`; ending it in any way drops them.
"""

import threading
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from ..caches.feature import content
from ..caches.lease import Lease
from ..caches.pool import Storage
from ..errors import ModelError, StateError
from ..loop import Key, Result, Step, Tensors, Unit, Wait, key_of
from ..program import Bound, bind
from ..request import Request
from .env import RequestEnv
from .events import Artifact, Cancelled, Done, Event, Failed, Queued, Started, Stepped
from .execute import Call, Executor, eager
from .flags import Flags, not_finite
from .instance import Instance
from .store import Weights

Listener = Callable[[Event], None]
WEIGHTS = "new weights"  # what a job waits for whose model's weights are being replaced


class Observer(Protocol):
    """Sees every step of a job after it ran: for parity, traces and capture. Must not change what it sees."""

    def on_step(self, job: "Job", step: Step, key: Key, result: Result) -> None: ...


@dataclass(slots=True)
class _Told:
    """What there is to tell of a step whose result was taken: `left` steps after it, `seconds` for taking it."""

    stage: str
    step: Step
    index: int
    left: int
    emitted: Tensors
    seconds: float


class Job:
    """A request on an instance. `status`: queued, running, waiting, done, failed or cancelled.

    One that `follows` goes on when weights are swapped in the middle of it. `weights` are those it ended with, and
    `weights_before` those it ran with before a swap.
    """

    def __init__(
        self,
        model: Instance,
        request: Request,
        *,
        listener: Listener | None = None,
        observers: Sequence[Observer] = (),
        follows: bool = False,
    ) -> None:
        self.id = uuid.uuid4().hex[:12]
        self.model, self.request, self.follows = model, request, follows
        self.env = RequestEnv(model, model.bind(request))
        self.stages: tuple[Bound, ...] = bind(model.card, request, model.loops)
        self.stage, self.index = 0, 0
        self.state: object | None = None
        self.slots: dict[str, torch.Tensor] = {}
        self.leases: dict[str, Lease] = {}
        self.status = "queued"
        self.waiting_for = ""
        self.output: Tensors | None = None
        self.error: Exception | None = None
        self.seconds = 0.0
        self.weights: Mapping[str, Weights] = {}
        self.weights_before: list[Mapping[str, Weights]] = []
        self.wake: Callable[[], None] | None = None  # told of `cancel` and `feed`, from whichever thread
        self.forecast: Callable[[int], float | None] | None = None  # steps left in the stage -> seconds left in all
        self.settle: Callable[[], None] | None = None  # confirms what is not yet: a stage ends with nothing open
        self._unconfirmed: _Told | None = None
        self._outputs = set(model.card.programs[request.task].outputs.values())
        self._started = 0.0
        self._listener, self._observers = listener, tuple(observers)
        self._cancelled = self._entered = False
        self._changing = threading.RLock()  # of the state: `feed` comes from other threads than whoever drives the job
        self._emit(Queued(self.id))

    @property
    def ended(self) -> bool:
        """Whether nothing will happen to the job any more."""
        return self.status in ("done", "failed", "cancelled")

    @property
    def runnable(self) -> bool:
        """Whether `step` has something to do: a step to run, a cancellation to carry out, or to look for weights."""
        return self.status != "waiting" or self._cancelled or self.held

    @property
    def stopping(self) -> bool:
        """Whether the job was cancelled and is still to hear of it."""
        return self._cancelled and not self.ended

    def cancel(self) -> None:
        """Ask to stop at the next step boundary. Safe from any thread."""
        self._cancelled = True
        self._wake()

    def feed(self, port: str, item: Tensors | None) -> None:
        """Give the current loop an item it may be waiting for; None closes the port. Safe from any thread."""
        with self._changing:
            if self.state is None:
                raise StateError("the job is not running", value=self.status)
            self.state = self.stages[self.stage].loop.feed(self.state, port, item)
            self.status, self.waiting_for = "running", ""
        self._wake()

    def step(self) -> None:
        """Run one step alone, if there is one. Any error ends this job, and this job alone, with `Failed`."""
        call = self.pending()
        if call is not None:
            self.run(call)

    def run(self, call: Call, execute: Executor = eager) -> None:
        """Run this job's pending step alone."""
        begun = time.perf_counter()
        try:
            result, flags = perform(self.model, call, execute)
            fine = flags.wait()
        except Exception as error:
            self.fail(error)
        else:
            self.complete(call, result, time.perf_counter() - begun, fine is None or all(fine))

    def pending(self) -> Call | None:
        """The step to run next, as a call for this job alone; None if the job has ended or waits.

        Stages begin and end here.
        """
        if self.ended:
            return None
        try:
            self._started = self._started or time.perf_counter()
            if self._cancelled:
                self._end("cancelled", Cancelled(self.id))
                return None
            if not self._entered and not self._enter():
                return None
            with self._changing:
                return self._pending()
        except Exception as error:
            self.fail(error)
            return None

    def complete(self, call: Call, result: Result, seconds: float, finite: bool = True) -> None:
        """Take the result of a pending step, which took `seconds`."""
        self.advance(call, result)
        self.confirm(seconds, finite)

    def advance(self, call: Call, result: Result) -> None:
        """Take the result of a pending step, of which is not known yet how long it takes and whether it is finite."""
        if self.ended:
            return
        try:
            self._advance(call.step, call.key, result)
        except Exception as error:
            self.fail(error)

    def confirm(self, seconds: float, finite: bool) -> None:
        """The step whose result was taken last took `seconds`; now its events are told. Without any, nothing."""
        told, self._unconfirmed = self._unconfirmed, None
        if told is None or self.ended:
            return
        try:
            if not finite:
                raise not_finite(told.step.finite)
            self._tell(told, seconds)
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """End with this error; running out of memory is told by its stage."""
        if out_of_memory(error):
            told = ModelError(
                f"out of memory in stage {self.stages[self.stage].stage.name} ({str(error).splitlines()[0]})",
                remedy="ask for a smaller size, fewer frames or a shorter max_sequence_length"
                + (", or for fewer rows a call" if self.request.rows > 1 else ""),
            )
            told.__cause__, error = error, told
        self.error = error
        if error.__traceback__ is not None or error.__cause__ is not None:
            detach(error)
        self._end("failed", Failed(self.id, error))

    @property
    def begun(self) -> bool:
        """Whether some of it has been computed."""
        return self.stage > 0 or self.state is not None

    def take_up(self) -> None:
        """Be under way from where it was left. Raises StateError while the model's weights are being replaced."""
        if not self._enter():
            raise StateError("the weights of the model are being replaced", remedy="try again when they are there")
        self.status = "running"

    @property
    def held(self) -> bool:
        """Whether it has not begun because weights are being replaced; it tries again whenever it is looked at."""
        return self.waiting_for == WEIGHTS

    def resume(self) -> None:
        """The weights it waited for are there. Safe from any thread."""
        self._wake()

    @property
    def weights_record(self) -> dict[str, object]:
        """Which weights it ran with, as JSON values."""
        earlier = [_recorded(weights) for weights in self.weights_before]
        return {"weights": _recorded(self.weights), **({"weights_before": earlier} if earlier else {})}

    def swapped(self) -> None:
        """The weights it has run with so far are about to be others."""
        self.weights_before.append(self.model.weights())

    def _enter(self) -> bool:
        """Be under way on the instance, or on the one that has taken its place; False while weights are replaced."""
        while not self._entered:
            self._entered = self.model.crew.enter(self)
            if not self._entered:
                if self.model.successor is None:
                    self.status, self.waiting_for = "waiting", WEIGHTS
                    return False
                self.model = self.model.successor
                self.env = replace(self.env, model=self.model)
        self.status, self.waiting_for = "queued", ""
        return True

    def _pending(self) -> Call | None:
        while not self.ended:
            bound = self.stages[self.stage]
            if self.state is None:
                self._begin(bound)
            step = bound.loop.next(self.state)
            if isinstance(step, Wait):
                self._wait(step)
                return None
            if step is not None:
                storage: Mapping[str, Storage] = {}
                if step.leases:
                    step, storage = self._leased(step)
                key = key_of(step, self.model.version, self.slots)
                handles = {name: (self.slots[ref.slot],) for name, ref in step.handles.items()}
                return Call(step, key, step.tensors, handles, 1, storage)
            self._leave(bound)
        return None

    def _leased(self, step: Step) -> tuple[Step, Mapping[str, Storage]]:
        """The step with the rows that find its pages, and what these lie in. The stage's leases begin here."""
        rows, storage = {}, {}
        for name, ref in step.leases.items():
            lease = self.leases.get(ref.lease)
            if lease is None:
                pool = self.model.store.pools.get(step.binding.device, ref.page)
                lease = self.leases[ref.lease] = Lease(pool)
            lease.require_current(step.uses, self.model.version)
            rows[f"{name}_pages"], rows[f"{name}_length"] = lease.rows(ref)
            storage[name] = lease.pool.storage
        return replace(step, tensors={**step.tensors, **rows}), storage

    def _release(self) -> None:
        """Give back what is leased: only the state that ends now knows what of it counts."""
        for lease in self.leases.values():
            lease.release()
        self.leases = {}

    def _advance(self, step: Step, key: Key, result: Result) -> None:
        begun, bound = time.perf_counter(), self.stages[self.stage]
        for observer in self._observers:
            observer.on_step(self, step, key, result)
        with self._changing:
            left = sum(count for _, count in bound.loop.outlook(self.state)) - 1
            self.state, emitted = bound.loop.advance(self.state, result)
        self.index += 1
        self._unconfirmed = _Told(bound.stage.name, step, self.index, left, emitted, time.perf_counter() - begun)

    def _tell(self, told: "_Told", seconds: float) -> None:
        eta = None if self.forecast is None else self.forecast(told.left)
        total, seconds = told.index + told.left, seconds + told.seconds
        self._emit(Stepped(self.id, told.stage, told.step.unit, told.index, total, seconds, eta))
        if told.emitted:
            self._emit(Artifact(self.id, told.stage, told.emitted))

    def _wake(self) -> None:
        if self.wake is not None:
            self.wake()

    def _wait(self, wait: Wait) -> None:
        self.status, self.waiting_for = "waiting", wait.port

    def _begin(self, bound: Bound) -> None:
        self.status = "running"
        self._emit(Started(self.id, bound.stage.name))
        inputs = {slot: self.slots[slot] for slot in bound.stage.reads if slot in self.slots}
        self.state, self.index = bound.loop.init(self.request, inputs, self.env), 0

    def _leave(self, bound: Bound) -> None:
        if self.settle is not None:
            self.settle()
            if self.ended:
                return
        written = bound.loop.finish(self.state)
        if len(bound.stage.writes) == 1:
            written = dict(zip(bound.stage.writes, written.values(), strict=True))
        elif unknown := set(written) - set(bound.stage.writes):
            raise AssertionError(f"stage {bound.stage.name} wrote undeclared slots {sorted(unknown)}")
        self.slots.update(written)
        self._release()
        self.state, self.stage = None, self.stage + 1
        if self.stage == len(self.stages):
            self.output = {slot: tensor for slot, tensor in self.slots.items() if slot in self._outputs}
            self.seconds = time.perf_counter() - self._started
            self.weights = self.model.weights()
            self._end("done", Done(self.id, self.output, self.seconds))
        else:
            self._drop_unread()

    def _drop_unread(self) -> None:
        """Slots that no later stage reads and that are no output are given back at once."""
        read = {name for bound in self.stages[self.stage :] for name in bound.stage.reads} | self._outputs
        self.slots = {name: tensor for name, tensor in self.slots.items() if name in read}

    def _end(self, status: str, event: Event) -> None:
        self._release()
        self.status, self.state, self.slots, self.waiting_for = status, None, {}, ""
        self._unconfirmed = None
        self.model.crew.leave(self)
        self._emit(event)

    def _emit(self, event: Event) -> None:
        if self._listener is not None:
            try:
                self._listener(event)
            except Exception as error:
                self._listener = None  # it ends this job once; telling it of that would end the runner as well
                if not self.ended:
                    raise
                told = f"the listener of job {self.id}, which is {self.status}, raised {type(error).__name__}: {error}"
                warnings.warn(told, RuntimeWarning, stacklevel=2)


def _recorded(weights: Mapping[str, Weights]) -> dict[str, object]:
    return {name: one.record() for name, one in weights.items()}


def perform(model: Instance, call: Call, execute: Executor) -> tuple[Result, Flags]:
    """The result of a call for one request, and whether it is finite. Embeddings this process has computed before are
    not computed again.
    """
    step = call.step
    if step.unit is not Unit.EMBED:
        tensors = execute(model, call)
    else:
        owner, version = model.origin(step.uses[0]), model.version(step.uses[0])
        key = (step.op, version, step.binding, tuple(step.static.items()), content(step.tensors))
        tensors = model.store.features.compute(owner, key, lambda: execute(model, call))
    return Result(tensors, host_values(step, tensors)), Flags(step, tensors)


def host_values(step: Step, tensors: Tensors) -> dict[str, list[float]]:
    """The results the host must see, a value a row. Waits for the device."""
    return {name: tensors[name].tolist() for name in step.reads}


def out_of_memory(error: Exception) -> bool:
    """On CUDA torch says it by type, on the CPU by words."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "allocate memory" in str(error)
    )


def detach(error: BaseException) -> None:
    """A traceback keeps alive every variable of its frames and of their callers': it stays as text alone."""
    error.add_note("".join(traceback.format_exception(error)).rstrip())
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
