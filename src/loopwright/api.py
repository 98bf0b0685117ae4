"""The Python API: load a model, generate, stream.

    model = loopwright.load("loopwright/tiny-wan")
    result = model.generate("a fox moving left on a blue background", seed=7)
    result.save("fox.mp4")

One seed gives the noise that diffusers draws with a CPU generator of that seed. Several threads may generate at once.
Files are read and written through `media`, imported when first needed: workers that only compute need no codecs.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from . import __version__, catalog
from .backends.capture import require_capture
from .backends.device import pick, preferred_dtype
from .backends.precision import DTYPES
from .card import Card, derive, experts
from .engine.calibrate import choose_rows
from .engine.events import Cancelled, Done, Event, Failed
from .engine.execute import Executor, eager
from .engine.graphs import Graphs
from .engine.instance import Instance, Store
from .engine.job import Job, Listener
from .engine.policy import POLICIES
from .engine.residence import MEMORY
from .engine.scheduler import Scheduler
from .engine.sizes import Sizes
from .errors import CardError, MediaError, RequestError
from .files import cache_folder, replacing
from .loops.denoise import SOLVERS
from .program import check, resolve
from .request import Frames, Request
from .weights import lora as adapters
from .weights.hub import is_local
from .weights.load import load_component

Pixels = NDArray[np.uint8]
Media = Pixels | str | Path | Frames
Parameter = str | int | float | None
GRAPHS = ("auto", "always", "never")


@dataclass(frozen=True, slots=True)
class Result:
    """What was generated, and all that is needed to repeat it.

    `latents` float32 [1, C, T, H, W] on the model's device; `video` uint8 [T, H, W, 3], None if only latents were
    asked for; `request` is fully resolved; `record` is what saved files carry.
    """

    request: Request
    latents: torch.Tensor
    video: Pixels | None
    seconds: float
    record: Mapping[str, object]

    @property
    def image(self) -> Pixels:
        """The first frame, uint8 [H, W, 3]."""
        first: Pixels = self._pixels()[0]
        return first

    def save(self, path: str | Path) -> Path:
        """Write .mp4, .gif or an image with the record embedded, or .safetensors with the latents."""
        from . import media

        path = Path(path)
        if path.suffix == ".safetensors":
            try:
                with replacing(path) as temporary:
                    record = {"loopwright": json.dumps(self.record)}
                    save_file({"latents": self.latents.cpu()}, temporary, metadata=record)
            except (OSError, SafetensorError) as error:
                raise MediaError(f"cannot write {path} ({error})", remedy="choose another place") from error
        else:
            media.write(path, self._pixels(), fps=self.request.fps, metadata=self.record)
        return path

    def _pixels(self) -> Pixels:
        if self.video is None:
            raise RequestError(
                "only latents were asked for",
                value=self.request.output,
                choices=("video",),
                remedy='generate with output="video"',
            )
        return self.video


class Model:
    """A loaded model. Its components are read when first used. `graphs` are None where steps are not captured."""

    def __init__(self, source: str, instance: Instance, graphs: Graphs | None = None) -> None:
        self.source, self.instance, self.graphs = source, instance, graphs
        self._sizes = Sizes()

    @property
    def execute(self) -> Executor:
        """How steps of the model are run: as graphs, or eagerly."""
        return eager if self.graphs is None else self.graphs

    @property
    def card(self) -> Card:
        """The card as it runs: precision and sampler resolved."""
        return self.instance.card

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
            image=_frames(image, still=True),
            video=_frames(video, still=False),
            prompt=prompt,
            **parameters,
        )
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

    def run_all(self, requests: Sequence[Request], *, listener: Listener | None = None) -> Iterator[Result]:
        """Generate from complete requests of this model: results as they are done, in whichever order that is.

        Requests in `fixed` and `throughput` mode share calls. What ended a request is raised when the others are done.
        """
        for request in requests:
            if request.model != self.card.name:
                raise RequestError("the request is of another model", value=request.model, choices=(self.card.name,))
            check(self.card, request)
        scheduler = self.scheduler()
        jobs = [scheduler.submit(Job(self.instance, request, listener=listener)) for request in requests]
        failed: Exception | None = None
        try:
            for job in scheduler.ended(jobs):
                failed = failed or job.error
                if job.error is None:
                    yield self.result(job)
        finally:  # whoever stops listening wants no more of it
            for job in jobs:
                job.cancel()
            scheduler.run()
        if failed is not None:
            raise failed

    def scheduler(self, *, policy: str = "fifo", rows: int = 32) -> Scheduler:
        """A scheduler for requests of this model and of others that share its store and device.

        `policy` is one of `engine.policy.POLICIES`, `rows` bounds a call in throughput mode. On CUDA requests begin
        when there is memory for them, and what is idle makes room for one that would fail.
        """
        if policy not in POLICIES:
            raise RequestError("unknown policy", value=policy, choices=POLICIES)
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
            execute=self.execute,
            relief=self._relief,
            rows=rows,
        )

    def _relief(self) -> bool:
        """Give back what idle graphs and components hold; graphs first, because they keep components where they are."""
        freed = self.graphs is not None and self.graphs.relief()
        return self.instance.store.release(self.instance.binding.device, sys.maxsize) > 0 or freed

    def rows(self, request: Request, *, limit: int = 32) -> int:
        """How many rows calls should have in fixed mode for requests of this shape: as many as still pay, at most
        `limit`. Measured on the device now, unless it is known, and proved: a row's bits depend on nobody.
        """
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
            record=self.record(job.request),
        )

    def record(self, request: Request) -> dict[str, object]:
        """Everything that repeats a result, as JSON values: the model as it ran, and the request."""
        return {
            "loopwright": __version__,
            "model": self.source,
            "revision": self.card.components[experts(self.card)[0]].revision
            or None,  # the commit, where a branch was named
            "card": self.card.digest,
            "device": self.instance.binding.device,
            "dtypes": {name: c.dtype for name, c in self.card.components.items() if c.dtype},
            "sampler": sampler_of(self.card),
            "compile": self.instance.binding.compile,
            "lora": [use.record() for use in self.instance.adapters],
            "request": request.record(),
        }


def load(
    source: str | Path,
    *,
    revision: str | None = None,
    device: str = "auto",
    dtype: str | Mapping[str, str] | None = None,
    sampler: str | None = None,
    store: Store | None = None,
    memory: str = "auto",
    graphs: str = "auto",
    compile: bool = False,
    lora: str | Path | Sequence[str | Path] = (),
) -> Model:
    """A model from a shipped id, a Diffusers folder or a hub name.

    Args:
        revision: branch, tag or commit of a hub name.
        device: "auto" takes the fastest of this machine.
        dtype: precision of the generator, or of components by name; by default the card's ("auto" on a card without
            a preference: bfloat16 on CUDA, float32 elsewhere; encoders and autoencoder float32). "float8" is bfloat16
            with the feed-forward layers in 8 bits, on CUDA from sm_89.
        sampler: "euler" or "unipc" instead of the card's, if its weights allow it.
        store: share components with other models.
        memory: "high" keeps weights on the device after their first use; "low" keeps them on the host and brings them
            for the steps that use them, the generator a layer at a time; "auto" is "high" where all weights fit in
            three quarters of the device's free memory, by their files' headers. Results are the same bit for bit.
        graphs: "always" captures denoising steps as CUDA graphs once they have run, which saves the host's time and
            takes device memory (at most `engine.graphs.LIMIT`); "auto" is "always" on CUDA unless memory is "low".
            Results are the same bit for bit. What cannot be captured runs eagerly: `Model.graphs.breaks` says what,
            and why.
        compile: compile the generator's blocks: faster, after some seconds at the first step of each shape. Results
            are close to those without, not the same, in `exact` mode too. Needs memory "high".
        lora: adapters of the generator, files in the layout of diffusers, ComfyUI or kohya: "style.safetensors", or
            "style.safetensors:0.8" to scale what it adds (0 is the model without it, bit for bit). Of a model with two
            experts, "transformer_2=style.safetensors" says whose it is. They run unmerged, in the generator's
            precision, which must not be "float8". An adapter that does not fit is refused.

    Raises WeightsError, CardError, RequestError or BackendError before any weight is read.
    """
    for what, value, choices in (("memory", memory, MEMORY), ("graphs", graphs, GRAPHS)):
        if value not in choices:
            raise RequestError(f"unknown {what}", value=value, choices=choices)
    if memory == "low" and (compile or graphs == "always"):
        raise RequestError(
            f"{'compiled blocks' if compile else 'captured graphs'} need weights that stay on the device",
            value="memory low",
            choices=("memory high", "memory auto"),
        )
    card = catalog.find(str(source), revision=revision)
    device = pick(device)
    card = _with_sampler(_with_precision(card, dtype, device), sampler)
    uses = _adapters(card, [lora] if isinstance(lora, (str, Path)) else lora)
    store = Store(prices=cache_folder() / "prices") if store is None else store
    instance = Instance(
        card,
        catalog.loops(card),
        store,
        device=device,
        locate=catalog.locate,
        prepare=catalog.preparation(card),
        memory=memory,
        compile=compile,
        adapters=uses,
    )
    return Model(_lasting(str(source)), instance, _graphs(graphs, memory, store, device))


def _adapters(card: Card, given: Sequence[str | Path]) -> tuple[adapters.Use, ...]:
    """The adapters, known to fit: shapes are compared with modules without weights."""
    uses = adapters.uses(given, experts(card))
    for use in uses:
        component = card.components[use.component]
        folder = catalog.locate(card, component, weights=False)
        outline = load_component(component, folder, "meta")
        assert isinstance(outline, torch.nn.Module)
        adapters.check(outline, use.adapter)
    return uses


def _graphs(choice: str, memory: str, store: Store, device: str) -> Graphs | None:
    """Raises BackendError where they are asked for and the device has none."""
    if choice == "auto":
        choice = "always" if device.startswith("cuda") and memory != "low" else "never"
    if choice == "never":
        return None
    require_capture(device)
    return Graphs(ledger=store.ledger(device))


def read_record(path: str | Path) -> dict[str, object]:
    """The record a saved result carries. Raises MediaError if the file has none."""
    if Path(path).suffix != ".safetensors":
        from . import media

        return dict(media.read_metadata(path))
    try:
        with safe_open(path, framework="pt") as file:
            return dict(json.loads((file.metadata() or {})["loopwright"]))
    except (OSError, SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise MediaError(f"{path} carries no record of a generation ({error})") from error


def _lasting(source: str) -> str:
    """The source as it can be named from any folder: a local one by its absolute path."""
    return str(Path(source).expanduser().resolve()) if source not in catalog.SHIPPED and is_local(source) else source


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


def _with_sampler(card: Card, sampler: str | None) -> Card:
    if sampler is None:
        return card
    if sampler not in SOLVERS:
        raise RequestError("unknown sampler", value=sampler, choices=SOLVERS)
    return derive(card, loops={denoising(card): SOLVERS[sampler].semantics})


def _with_precision(card: Card, dtype: str | Mapping[str, str] | None, device: str) -> Card:
    asked = dict.fromkeys(experts(card), dtype) if isinstance(dtype, str) else dict(dtype or {})
    weighted = {name: component for name, component in card.components.items() if component.dtype}
    for name, value in asked.items():
        if value not in DTYPES:
            raise RequestError("unknown dtype", value=value, choices=DTYPES)
        if name not in weighted:
            raise RequestError(f"{card.name} has no such component with weights", value=name, choices=weighted)
    chosen = {name: replace(component, dtype=asked.get(name, component.dtype)) for name, component in weighted.items()}
    auto = preferred_dtype(device)
    return derive(card, components={n: replace(c, dtype=auto) if c.dtype == "auto" else c for n, c in chosen.items()})


def _frames(given: Media | None, *, still: bool) -> Frames | None:
    """Pixels or a file as `Frames`; only an image's first frame is meant where `still`."""
    if given is None or isinstance(given, Frames):
        return given
    source = ""
    if isinstance(given, (str, Path)):
        from . import media

        source = str(Path(given).expanduser().resolve())
        given = media.read_image(given) if still else media.read_video(given)[0]
    pixels = np.asarray(given)
    expected = "[H, W, 3]" if still else "[T, H, W, 3]"
    if pixels.dtype != np.uint8 or pixels.ndim != (3 if still else 4) or pixels.shape[-1] != 3:
        raise RequestError(
            f"{'an image' if still else 'a video'} must be a path or uint8 pixels {expected}",
            value=f"{pixels.dtype} {list(pixels.shape)}",
        )
    shape = (1, *pixels.shape) if still else pixels.shape
    return Frames(np.ascontiguousarray(pixels).tobytes(), shape, source)
