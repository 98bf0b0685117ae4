"""Runs a card's parity claims and prints what was measured.

    for finding in verify("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", device="cuda"):
        print(finding.claim.level, finding.measured, finding.holds)

The request is generated here first, then, with our model gone from memory, by the reference on the same checkpoint,
loaded by the reference. Levels: `component` (parts on equal input), `trajectory` (latents step by step), `batch` (a
request alone and among strangers), `output` (the pictures). Deliberately absent: a tolerance that is not on the card.
"""

import gc
import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, cast

import torch

from . import api, catalog
from .backends.device import pick
from .card import REFERENCES, Card, Claim, Component, experts, whole
from .engine.job import Job
from .engine.runner import Interleaved, Serial
from .errors import CardError, RequestError
from .loop import Key, Result, Step, Unit
from .request import Frames, Request

ROWS = 4  # of a call in fixed mode: the request and its three strangers
LEVELS = ("component", "trajectory", "batch", "output")


@dataclass(frozen=True, slots=True)
class Finding:
    """A claim, the figure measured for it, and what else was seen."""

    claim: Claim
    measured: float
    holds: bool
    detail: str


@dataclass(slots=True)
class Trace:
    """What one run left, on the CPU: first call of the network, latents after each step, the result, its cost."""

    network: dict[str, torch.Tensor] = field(default_factory=dict)
    steps: list[torch.Tensor] = field(default_factory=list)
    latents: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    frames: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    peak_bytes: int = 0


class _Reference(Protocol):
    """A family's `reference` module: the reference's own pipeline."""

    def pipeline(
        self, card: Card, request: Request, locate: Callable[[Card, Component], Path], device: str
    ) -> "_Pipeline": ...

    def run(
        self, built: "_Pipeline", request: Request, card: Card, on_step: Callable[[torch.Tensor], None]
    ) -> torch.Tensor: ...

    def decode(self, built: "_Pipeline", latents: torch.Tensor) -> torch.Tensor: ...


class _Pipeline(Protocol):
    transformer: "_Hookable"


class _Hookable(Protocol):
    def register_forward_hook(
        self, hook: Callable[..., None], *, with_kwargs: bool
    ) -> torch.utils.hooks.RemovableHandle: ...


def verify(
    source: str,
    *,
    against: str | None = None,
    task: str | None = None,
    device: str = "auto",
    dtype: str | None = None,
    revision: str | None = None,
    parameters: Mapping[str, int | float] | None = None,
) -> Iterator[Finding]:
    """Findings for each claim of the card as it runs here, in its precision.

    Args:
        against: only claims against this reference.
        task: only claims of this task.
        parameters: request parameters instead of the small ones chosen here, for a check at full size.
    """
    if against is not None and against not in REFERENCES:
        raise RequestError("unknown reference", value=against, choices=REFERENCES)
    model = api.load(source, revision=revision, device=device, dtype=dtype)
    card = model.card
    claims = _chosen(card, against, task)
    del model
    for name in dict.fromkeys(claim.task for claim in claims):
        mine = [claim for claim in claims if claim.task == name]
        model = api.load(source, revision=revision, device=device, dtype=dtype)
        request = _request(model, name, parameters or {})
        if batch := [claim for claim in mine if claim.level == "batch"]:
            yield from _batch(model, request, batch)
        if others := [claim for claim in mine if claim.level != "batch"]:
            ours = _ours(model, request)
            del model
            _release()
            yield from _compare(card, request, ours, others, device)


def _chosen(card: Card, against: str | None, task: str | None) -> list[Claim]:
    precision = card.components[experts(card)[0]].dtype
    if task is not None and task not in card.programs:
        raise RequestError(f"{card.name} has no such task", value=task, choices=card.programs)
    claims = [
        claim
        for claim in card.claims
        if claim.precision == precision and task in (None, claim.task) and against in (None, claim.reference)
    ]
    for claim in claims:
        if claim.level not in LEVELS:
            raise CardError(f"{card.name} claims an unknown level", value=claim.level, choices=LEVELS)
    if not claims:
        made = sorted({f"{c.level} against {c.reference} for {c.task} in {c.precision}" for c in card.claims})
        raise RequestError(f"{card.name} claims nothing of that kind in {precision}", choices=made)
    return claims


def _request(model: api.Model, task: str, parameters: Mapping[str, int | float]) -> Request:
    """A small request of the task on synthetic media, so that a check takes minutes on the largest models."""
    settings, defaults, recipe = model.card.settings, model.card.defaults[task], model.card.recipe
    multiple, stride = whole(settings, "size_multiple"), whole(settings, "frame_stride")
    sizes = {name: _smaller(defaults[name], 256 // multiple * multiple) for name in ("height", "width")}
    values: dict[str, int | float] = {
        **sizes,
        "num_frames": 2 * stride + 1,
        "num_inference_steps": recipe.steps[0] if recipe.steps else 6,
        "seed": 11,
        **parameters,
    }
    media = {name: _synthetic(name, values, stride) for name in model.card.programs[task].inputs}
    return model.request(
        "a red fox leaps over a frozen river",
        task=task,
        negative_prompt="blurry",
        image=media.get("image"),
        video=media.get("video"),
        **values,
    )


def _smaller(default: object, limit: int) -> int:
    assert isinstance(default, int)
    return min(default, limit)


def _synthetic(name: str, values: Mapping[str, int | float], stride: int) -> Frames:
    """A smooth picture with some noise, or a clip of it drifting."""
    height, width = int(values["height"]), int(values["width"])
    frames = 1 if name == "image" else int(values["num_frames"])
    noise = torch.randint(0, 32, (frames, height, width, 3), generator=torch.Generator().manual_seed(5))
    ramp = torch.arange(height)[:, None, None] * 2 + torch.arange(width)[None, :, None] + torch.tensor([0, 60, 120])
    drift = ramp[None] + torch.arange(frames)[:, None, None, None] * 4
    pixels = (drift % 224 + noise).to(torch.uint8)
    return Frames(pixels.numpy().tobytes(), (frames, height, width, 3), f"synthetic {name}")


def _ours(model: api.Model, request: Request) -> Trace:
    trace = Trace()

    class Watch:
        def on_step(self, job: Job, step: Step, key: Key, result: Result) -> None:
            if step.unit is Unit.DENOISE:
                trace.steps.append(result.tensors["latents"].cpu())

    with _measured(trace, model.instance.binding.device), _tapped(trace, _first_expert(model, request)):
        job = Job(model.instance, request, observers=(Watch(),))
        runner = Serial()
        runner.submit(job)
        runner.run()
        result = model.result(job)
    trace.latents = result.latents.cpu()
    trace.frames = torch.from_numpy(result.video)[None]
    return trace


def _first_expert(model: api.Model, request: Request) -> _Hookable:
    return cast(_Hookable, model.instance.part(experts(model.card)[0]))


def _theirs(card: Card, request: Request, ours: Trace, device: str) -> Trace:
    trace = Trace()
    device = pick(device)
    reference: _Reference = importlib.import_module(f".models.{card.family}.reference", __package__)  # type: ignore[assignment]
    with _measured(trace, device):
        pipe = reference.pipeline(card, request, catalog.locate, device)
        with _tapped(trace, pipe.transformer):
            trace.latents = reference.run(pipe, request, card, lambda x: trace.steps.append(x.cpu())).cpu()
        trace.frames = reference.decode(pipe, trace.latents)
    trace.network["decode"] = reference.decode(pipe, ours.latents)  # the autoencoder on equal latents
    return trace


def _compare(card: Card, request: Request, ours: Trace, claims: Sequence[Claim], device: str) -> Iterator[Finding]:
    try:
        theirs = _theirs(card, request, ours, device)
    except RuntimeError as error:  # the reference cannot run this checkpoint: no claim against it holds
        for claim in claims:
            yield Finding(claim, math.inf, False, f"the reference failed: {error}")
        return
    for claim in claims:
        if claim.level == "component":
            yield _component(claim, ours, theirs)
        elif claim.level == "trajectory":
            yield _trajectory(claim, ours, theirs)
        else:
            yield _finding(claim, _measure(claim, ours.frames, theirs.frames), "frames")
    _release()


def _component(claim: Claim, ours: Trace, theirs: Trace) -> Finding:
    errors = {name: _relative(ours.network[name], theirs.network[name]) for name in ("text", "input", "output")}
    errors["decode"] = _relative(ours.frames.float(), theirs.network["decode"].float())
    return _finding(claim, max(errors.values()), ", ".join(f"{name} {error:.3g}" for name, error in errors.items()))


def _trajectory(claim: Claim, ours: Trace, theirs: Trace) -> Finding:
    """The claim is about the final latents; the first step that differs is named."""
    if len(ours.steps) != len(theirs.steps):
        return _finding(claim, math.inf, f"{len(ours.steps)} steps here, {len(theirs.steps)} in the reference")
    errors = [_relative(a, b) for a, b in zip(ours.steps, theirs.steps, strict=True)]
    first = next((i for i, error in enumerate(errors, start=1) if error), None)
    where = (
        f"first divergence at step {first} of {len(errors)}: {errors[first - 1]:.3g}" if first else "every step equal"
    )
    memory = (
        f"; peak {ours.peak_bytes / 2**30:.2f} GiB beside {theirs.peak_bytes / 2**30:.2f}" if ours.peak_bytes else ""
    )
    return _finding(claim, _relative(ours.latents, theirs.latents), where + memory)


def _batch(model: api.Model, request: Request, claims: Sequence[Claim]) -> Iterator[Finding]:
    """The request alone and among strangers: taking turns in exact mode, sharing calls in fixed mode."""
    errors = {"exact": _among(model, request), "fixed": _among(model, replace(request, mode="fixed", rows=ROWS))}
    detail = ", ".join(f"{mode} mode {error:.3g}" for mode, error in errors.items())
    for claim in claims:
        yield _finding(claim, max(errors.values()), f"{detail}; alone and with 3 strangers")


def _among(model: api.Model, request: Request) -> float:
    """The error of latents and frames with three strangers of other prompts, seeds and, if allowed, lengths."""
    alone = model.run(request)
    steps = request.num_inference_steps
    lengths = [steps] * 3 if model.card.recipe.steps else [steps, steps + 1, max(2, steps - 1)]
    strangers = [
        replace(request, prompt=f"stranger {i}", seed=request.seed + i, num_inference_steps=n, output=output)
        for i, (n, output) in enumerate(zip(lengths, ("video", "latents", "latents"), strict=True), start=1)
    ]
    runner = Interleaved() if request.mode == "exact" else model.scheduler()
    jobs = [runner.submit(Job(model.instance, one)) for one in (strangers[0], request, *strangers[1:])]
    runner.run()
    among = model.result(jobs[1])
    frames = _relative(torch.from_numpy(among.video).float(), torch.from_numpy(alone.video).float())
    return max(_relative(among.latents, alone.latents), frames)


def _finding(claim: Claim, measured: float, detail: str) -> Finding:
    holds = measured >= claim.bound if claim.metric == "psnr" else measured <= claim.bound
    return Finding(claim, measured, holds, detail)


def _measure(claim: Claim, ours: torch.Tensor, theirs: torch.Tensor) -> float:
    if claim.metric != "psnr":
        return _relative(ours.float(), theirs.float())
    error = (ours.double() - theirs.double()).square().mean().item()
    return math.inf if error == 0 else 10 * math.log10(255**2 / error)


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """||a - b|| / ||b||; 0 only for equal bits, infinity for other shapes or anything not finite."""
    if a.shape != b.shape:
        return math.inf
    if torch.equal(a, b):
        return 0.0
    error = ((a.double() - b.double()).norm() / b.double().norm()).item()
    return error if math.isfinite(error) else math.inf


@contextmanager
def _tapped(trace: Trace, network: _Hookable) -> Iterator[None]:
    """Keep the first call of the network: its text, its input, its output."""

    def keep(
        module: object, args: tuple[object, ...], kwargs: Mapping[str, torch.Tensor], output: Sequence[torch.Tensor]
    ) -> None:
        if not trace.network:
            trace.network |= {
                "text": kwargs["encoder_hidden_states"].cpu(),
                "input": kwargs["hidden_states"].cpu(),
                "output": output[0].cpu(),
            }

    handle = network.register_forward_hook(keep, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _measured(trace: Trace, device: str) -> Iterator[None]:
    """Peak bytes allocated on a CUDA device; 0 elsewhere."""
    if not device.startswith("cuda"):
        yield
        return
    torch.cuda.reset_peak_memory_stats(device)
    yield
    trace.peak_bytes = torch.cuda.max_memory_allocated(device)


def _release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
