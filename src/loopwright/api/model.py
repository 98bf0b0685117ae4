"""A loaded model: what it is asked, how that runs, what comes of it."""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from .. import __version__
from ..card import Card, experts
from ..engine.calibrate import choose_rows
from ..engine.events import Cancelled, Done, Event, Failed
from ..engine.execute import Executor, eager
from ..engine.graphs import Graphs
from ..engine.instance import Instance
from ..engine.job import Job, Listener
from ..engine.policy import POLICIES
from ..engine.scheduler import Scheduler
from ..engine.sizes import Sizes
from ..engine.store import Weights
from ..engine.update import update
from ..errors import CardError, RequestError
from ..loops.denoise import SOLVERS
from ..loops.noise import with_noise
from ..program import check, resolve
from ..request import Request
from ..weights import sync
from ..weights.sync import Delivery
from .pixels import Media, frames
from .result import Result
from .trajectory import Trajectory

Parameter = str | int | float | None


class Model:
    """A loaded model. Its components are read when first used. `graphs` are None where steps are not captured."""

    def __init__(self, source: str, instance: Instance, graphs: Graphs | None = None) -> None:
        self.source, self.graphs = source, graphs
        self._instance, self._sizes = instance, Sizes()

    @property
    def instance(self) -> Instance:
        """What requests run on: the latest, where weights were replaced beside those of requests under way."""
        while self._instance.successor is not None:
            self._instance = self._instance.successor
        return self._instance

    @property
    def execute(self) -> Executor:
        """How steps of the model are run: as graphs, or eagerly."""
        return eager if self.graphs is None else self.graphs

    @property
    def card(self) -> Card:
        """The card as it runs: precision and sampler resolved."""
        return self.instance.card

    @property
    def revision(self) -> str | None:
        """The commit of a hub's model, where a branch was named; None for a folder."""
        return self.card.components[experts(self.card)[0]].revision or None

    def request(
        self,
        prompt: str,
        *,
        task: str | None = None,
        image: Media | None = None,
        video: Media | None = None,
        **parameters: Parameter,
    ) -> Request:
        """The complete request for these parameters, checked. Raises RequestError, MediaError or BackendError."""
        request = resolve(
            self.card,
            task=task,
            image=frames(image, still=True),
            video=frames(video, still=False),
            prompt=prompt,
            **parameters,
        )
        request = with_noise(request, SOLVERS[sampler_of(self.card)].stepper)
        self.instance.bind(request)
        return request

    def generate(
        self,
        prompt: str,
        *,
        task: str | None = None,
        image: Media | None = None,
        video: Media | None = None,
        listener: Listener | None = None,
        **parameters: Parameter,
    ) -> Result:
        """Generate from a prompt, and an image or a video where the model takes one.

        `parameters` are the fields of `Request` (negative_prompt, height, width, num_frames, num_inference_steps,
        guidance_scale, seed, output ...); what is left out is the card's default. `listener` gets events as they come.
        """
        request = self.request(prompt, task=task, image=image, video=video, **parameters)
        return self.run(request, listener=listener)

    def run(self, request: Request, *, listener: Listener | None = None) -> Result:
        """Generate from a complete request of this model. Raises what ended the job."""
        (result,) = self.run_all([request], listener=listener)
        return result

    def run_all(
        self, requests: Sequence[Request], *, listener: Listener | None = None, recorded: bool = False
    ) -> Iterator[Result]:
        """Generate from complete requests of this model: results as they are done, in whichever order that is.

        `recorded` ones have their trajectories.

        All are checked and queued before any runs, at once; if one cannot be, none is. Requests in `fixed` and
        `throughput` mode share calls. What ended a request is raised when the others are done.
        """
        for request in requests:
            if not isinstance(request, Request):
                raise RequestError("not a request", value=request, remedy="make it with Model.request")
            if request.model != self.card.name:
                raise RequestError("the request is of another model", value=request.model, choices=(self.card.name,))
            check(self.card, request)
            with_noise(request, SOLVERS[sampler_of(self.card)].stepper)
        scheduler, jobs, kept = self.scheduler(), list[Job](), dict[str, Trajectory]()
        try:
            for request in requests:
                trajectory = Trajectory()
                observers = [trajectory] if recorded else []
                jobs.append(scheduler.submit(Job(self.instance, request, listener=listener, observers=observers)))
                if recorded:
                    kept[jobs[-1].id] = trajectory
        except BaseException:
            self._abandon(scheduler, jobs)
            raise
        return self._results(scheduler, jobs, kept)

    def _results(self, scheduler: Scheduler, jobs: Sequence[Job], kept: Mapping[str, Trajectory]) -> Iterator[Result]:
        failed: Exception | None = None
        try:
            for job in scheduler.ended(jobs):
                failed = failed or job.error
                if job.error is None:
                    yield replace(self.result(job), trajectory=kept.get(job.id))
        finally:  # whoever stops listening wants no more of it
            self._abandon(scheduler, jobs)
        if failed is not None:
            raise failed

    def _abandon(self, scheduler: Scheduler, jobs: Sequence[Job]) -> None:
        """Cancel those that have not ended, and let them hear of it."""
        for job in jobs:
            job.cancel()
        scheduler.run()

    def scheduler(self, *, policy: str = "fifo", rows: int = 32, execute: Executor | None = None) -> Scheduler:
        """A scheduler for requests of this model and of others that share its store and device.

        `policy` is one of `engine.policy.POLICIES`, `rows` bounds a call in throughput mode, `execute` stands for the
        model's own. On CUDA requests begin when there is memory for them, and what is idle makes room for one that
        would fail.
        """
        if policy not in POLICIES:
            raise RequestError("unknown policy", value=policy, choices=POLICIES)
        _require_rows("rows", rows)
        instance, sizes = self.instance, self._sizes
        store, device = instance.store, instance.binding.device
        ledger = store.ledger(device)
        if ledger is not None:
            instance.set_aside(ledger)
        return Scheduler(
            policy=POLICIES[policy],
            prices=store.prices(device),
            ledger=ledger,
            need=lambda job: sizes.need(job.model, job.request),
            execute=self.execute if execute is None else execute,
            relief=self._relief,
            rows=rows,
        )

    def _relief(self) -> bool:
        """Give back what idle graphs and components hold; graphs first, because they keep components where they are."""
        freed = self.graphs is not None and self.graphs.relief()
        return self.instance.store.release(self.instance.binding.device, sys.maxsize) > 0 or freed

    def update_weights(
        self,
        component: str,
        source: torch.nn.Module | Delivery | str | Path,
        *,
        policy: str = "drain",
        version: int | None = None,
        seconds: float = 600.0,
    ) -> Weights:
        """Replace a component's weights while requests are served, and say which it has then.

        Args:
            source: a module of the same class, whose adapters go into the component's own, or merged if it has none;
                what `weights.sync` received; or files: a component's folder, its shards, or an adapter.
            policy: "drain" lets requests under way end with the weights they have, while others wait; "finish" lets
                them end on a copy, and nobody waits; "freeze" writes between two steps, and is refused while a request
                is under way that was not made to follow (`Job(..., follows=True)`).
            version: a larger number than the present one, by default the next.
            seconds: how long "drain" may take. Somebody else has to run the requests meanwhile.

        Raises WeightsError for what does not fit, StateError where requests under way forbid it, CapacityError where
        there is no room for a copy; the component is then as it was.
        """
        instance = self.instance
        receiver = instance.part(component)
        if isinstance(source, torch.nn.Module):
            source = sync.pack(source, receiver)
        elif not isinstance(source, Delivery):
            source = sync.read(source, instance.card.components[component])
        updated = update(instance, component, source, policy=policy, version=version, seconds=seconds)
        return updated.store.weights(updated.resident(component))

    def rows(self, request: Request, *, limit: int = 32) -> int:
        """How many rows calls should have in fixed mode for requests of this shape: as many as still pay, at most
        `limit`. Measured on the device now, unless it is known, and proved: a row's bits depend on nobody.
        """
        _require_rows("limit", limit)
        prices = self.instance.store.prices(self.instance.binding.device)
        return choose_rows(self.instance, request, prices, limit, self.execute)

    async def stream(
        self,
        prompt: str,
        *,
        task: str | None = None,
        image: Media | None = None,
        video: Media | None = None,
        **parameters: Parameter,
    ) -> AsyncIterator[Event | Result]:
        """Events as they happen, then the `Result`. Leaving the iteration cancels the job at the next step."""
        request = self.request(prompt, task=task, image=image, video=video, **parameters)
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()

        def listen(event: Event) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        job = Job(self.instance, request, listener=listen)
        scheduler = self.scheduler()
        scheduler.submit(job)
        work = loop.run_in_executor(None, scheduler.run)
        try:
            while True:
                event = await events.get()
                if isinstance(event, Failed):
                    raise event.error
                yield event
                if isinstance(event, Done):
                    yield self.result(job)
                if isinstance(event, (Done, Cancelled)):
                    return
        finally:
            job.cancel()
            await work

    def result(self, job: Job) -> Result:
        """The result of a finished job. Raises the error of a failed one, RequestError for one still under way."""
        if job.error is not None:
            raise job.error
        if job.output is None:
            waiting = f"feed its port {job.waiting_for!r}" if job.waiting_for else "run it to its end"
            raise RequestError("the job has no result", value=job.status, remedy=waiting)
        frames = job.output.get("frames")
        return Result(
            request=job.request,
            latents=job.output["latents"],
            video=None if frames is None else frames[0].cpu().numpy(),
            seconds=job.seconds,
            record={**self.record(job.request), **job.weights_record},
        )

    def record(self, request: Request) -> dict[str, object]:
        """Everything that repeats a result, as JSON values: the model as it ran, and the request.

        In that of a result stand the weights, too: version and checksum by component.
        """
        return {
            "loopwright": __version__,
            "model": self.source,
            "revision": self.revision,
            "card": self.instance.digest,
            "device": self.instance.binding.device,
            "dtypes": {name: c.dtype for name, c in self.card.components.items() if c.dtype},
            "sampler": sampler_of(self.card),
            "compile": self.instance.binding.compile,
            "lora": [use.record() for use in self.instance.adapters],
            "request": request.record(),
        }


def _require_rows(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RequestError(f"{name} must be a whole number of at least 1", value=value)


def sampler_of(card: Card) -> str:
    """The name of the card's solver."""
    return next(name for name, solver in SOLVERS.items() if solver.semantics == card.loops[denoising(card)])


def denoising(card: Card) -> str:
    """The name of the card's denoising loop. Raises CardError if it has none."""
    known = {solver.semantics for solver in SOLVERS.values()}
    for name, semantics in card.loops.items():
        if semantics in known:
            return name
    raise CardError(f"card {card.name} has no loop that denoises", choices=sorted(known), remedy="declare one")
