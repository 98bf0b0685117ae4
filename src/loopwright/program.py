"""Checks a card before any weight is read, resolves a request against it, and binds a task's stages to loops.

    program = bind(card, "text_to_video", loops)       # loops: semantics -> Loop, given by the family
    request = resolve(card, prompt="a red fox", seed=7)

Deliberately absent: running anything.
"""

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from .card import LEVELS, METRICS, REFERENCES, Card, Program, Stage, experts, whole
from .errors import CardError, RequestError
from .loop import Loop
from .request import ATTENTION, KERNELS, MODES, OUTPUTS, Frames, Request

Loops = Mapping[str, Loop[object]]
MAX_SEED = 2**63 - 1
_GIVEN = ("model", "task", "output", "mode", "rows", "image", "video", "seed")  # not defaults of a card
_OPTIONAL: Mapping[str, str | None] = {  # defaults that a card may leave out
    "attention": ATTENTION,
    "kernels": KERNELS,
    "noise_level": None,
    "noise_start": None,
    "noise_steps": None,
}


@dataclass(frozen=True, slots=True)
class Bound:
    """A stage with its loop, ready to run."""

    stage: Stage
    loop: Loop[object]


def validate(card: Card, loops: Loops) -> None:
    """Raise CardError on the first contradiction: loops, semantics, precision, components, slots, outputs, defaults."""
    for name, semantics in card.loops.items():
        if semantics not in loops:
            raise CardError(
                f"card {card.name}: loop {name!r} is unknown",
                value=semantics,
                choices=sorted(loops),
                remedy="name one of these, or add the loop to the family's table",
            )
        if semantics not in card.recipe.assumes:
            raise CardError(
                f"card {card.name}: its weights do not run under loop {name!r}",
                value=semantics,
                choices=card.recipe.assumes,
                remedy="pick one of these, or weights made for that loop",
            )
    for name in experts(card):
        dtype = card.components[name].dtype
        if dtype not in ("auto", *card.recipe.precision):
            raise CardError(
                f"card {card.name}: component {name!r} has a precision its weights do not assume",
                value=dtype,
                choices=card.recipe.precision,
                remedy="set the component's dtype to one of these",
            )
    for task, program in card.programs.items():
        _validate_program(card, task, program)
        _validate_defaults(card, task)
    for claim in card.claims:
        if claim.task not in card.programs:
            raise CardError(
                f"card {card.name} claims parity for a task it does not have",
                value=claim.task,
                choices=sorted(card.programs),
                remedy="claim one of these",
            )
        for name, known in (("level", LEVELS), ("reference", REFERENCES), ("metric", METRICS)):
            if getattr(claim, name) not in known:
                raise CardError(
                    f"card {card.name} makes a claim of an unknown {name}",
                    value=getattr(claim, name),
                    choices=known,
                    remedy="correct the claim",
                )


def _validate_program(card: Card, task: str, program: Program) -> None:
    where = f"card {card.name}, task {task}"
    written: set[str] = set()
    for stage in program.stages:
        here = f"{where}, stage {stage.name}"
        if stage.loop not in card.loops:
            raise CardError(
                f"{here}: loop is not declared",
                value=stage.loop,
                choices=sorted(card.loops),
                remedy="declare it under loops",
            )
        for name in stage.uses:
            if name not in card.components:
                raise CardError(
                    f"{here}: component is not declared",
                    value=name,
                    choices=sorted(card.components),
                    remedy="declare it under components",
                )
        for slot in stage.reads:
            if slot not in written:
                raise CardError(
                    f"{here}: reads a slot nobody has written before it",
                    value=slot,
                    choices=sorted(written),
                    remedy="write it in an earlier stage",
                )
        written.update(stage.writes)
    for name in program.inputs:
        if name not in ("image", "video"):
            raise CardError(
                f"{where}: unknown input", value=name, choices=("image", "video"), remedy="name one of these"
            )
    for output, slot in program.outputs.items():
        if output not in OUTPUTS:
            raise CardError(f"{where}: unknown output", value=output, choices=OUTPUTS, remedy="name one of these")
        if slot not in written:
            raise CardError(
                f"{where}: output {output!r} comes from a slot no stage writes",
                value=slot,
                choices=sorted(written),
                remedy="add the stage that writes it",
            )


def _validate_defaults(card: Card, task: str) -> None:
    known = [f.name for f in fields(Request) if f.name not in (*_GIVEN, "prompt")]
    given = card.defaults.get(task, {})
    for name in given:
        if name not in known:
            raise CardError(
                f"card {card.name}, task {task}: default of no parameter",
                value=name,
                choices=known,
                remedy="remove it or name one of these",
            )
    missing = [name for name in known if name not in given and name not in _OPTIONAL]
    if missing:
        raise CardError(
            f"card {card.name}, task {task}: no default for {', '.join(missing)}", remedy="add them under defaults"
        )


def bind(card: Card, request: Request, loops: Loops) -> tuple[Bound, ...]:
    """The stages that the requested output needs, in order, each with its loop."""
    program = card.programs[request.task]
    wanted = {program.outputs[request.output]}
    needed: list[Bound] = []
    for stage in reversed(program.stages):
        if wanted & set(stage.writes):
            wanted |= set(stage.reads)
            needed.append(Bound(stage, loops[card.loops[stage.loop]]))
    return tuple(reversed(needed))


def task_of(card: Card, task: str | None, given: Sequence[str]) -> str:
    """The task asked for, or the one whose inputs are the media `given` ("image", "video")."""
    if task is not None:
        if task not in list(card.programs):
            raise RequestError(f"{card.name} has no such task", value=task, choices=sorted(card.programs))
        return task
    for name, program in card.programs.items():
        if set(program.inputs) == set(given):
            return name
    needs = [f"{name} ({' and '.join(p.inputs) or 'prompt alone'})" for name, p in card.programs.items()]
    with_what = " and ".join(given) or "a prompt alone"
    raise RequestError(f"{card.name} has no task that takes {with_what}", choices=needs)


def resolve(
    card: Card, *, task: str | None = None, image: Frames | None = None, video: Frames | None = None, **given: object
) -> Request:
    """A complete request: what is given, else the card's default for the task. Raises RequestError.

    Values are checked against the card's settings: `size_multiple` (pixels), `frame_stride` (frames are a multiple
    of it plus one) and the recipe's steps. A missing seed is drawn here, so that the answer can state it.
    """
    media = {name: frames for name, frames in (("image", image), ("video", video)) if frames is not None}
    task = task_of(card, task, tuple(media))
    defaults = card.defaults[task]
    for name in card.programs[task].inputs:
        if name not in media:
            raise RequestError(f"task {task} of {card.name} needs {name}", remedy=f"give {name}=")
    for name in media:
        if name not in card.programs[task].inputs:
            raise RequestError(
                f"task {task} of {card.name} takes no {name}",
                choices=[t for t, p in card.programs.items() if name in p.inputs],
            )
    known = [*(f.name for f in fields(Request) if f.name != "model")]
    for name in given:
        if name not in known:
            raise RequestError("unknown parameter", value=name, choices=known)
    values = {**_OPTIONAL, **defaults, **{k: v for k, v in given.items() if v is not None}}
    values.setdefault("output", "video")
    values.setdefault("mode", "exact")
    if values["mode"] == "fixed" and "rows" not in values:
        raise RequestError("fixed mode needs its number of rows a call", value=None,
                           remedy="give rows=; Model.rows measures how many pay")  # fmt: skip
    values.setdefault("rows", 1)
    values.setdefault("seed", secrets.randbelow(2**32))
    if "prompt" not in values:
        raise RequestError("no prompt", remedy="give prompt=")
    if video is not None and given.get("num_frames") is None:
        stride = whole(card.settings, "frame_stride")
        values["num_frames"] = (video.shape[0] - 1) // stride * stride + 1
    if values["guidance_scale_2"] is None and card.settings.get("boundary") is not None:
        values["guidance_scale_2"] = values["guidance_scale"]
    request = Request(model=card.name, task=task, **values, **media)  # type: ignore[arg-type]
    check(card, request)
    return request


def check(card: Card, request: Request) -> None:
    """Raise RequestError where the card cannot make what the request says, naming the nearest values it can."""
    outputs = tuple(card.programs[request.task].outputs)
    if request.output not in outputs:
        raise RequestError("unknown output", value=request.output, choices=outputs)
    _check_geometry(card, request)
    _check_schedule(card, request)
    _check_guidance(card, request)
    if request.mode not in MODES:
        raise RequestError("unknown mode", value=request.mode, choices=MODES)
    if _integer("rows", request.rows, 1) > 1 and request.mode != "fixed":
        raise RequestError(
            f"{request.mode} mode has no fixed number of rows",
            value=request.rows,
            remedy='leave rows out, or give mode="fixed"',
        )
    _integer("fps", request.fps, 1)
    _integer("max_sequence_length", request.max_sequence_length, 1)
    if _integer("seed", request.seed, 0) > MAX_SEED:
        raise RequestError("seed is out of range", value=request.seed, remedy=f"0 to {MAX_SEED}")
    for name in ("prompt", "negative_prompt", "attention", "kernels"):
        if not isinstance(getattr(request, name), str):
            raise RequestError(f"{name} must be text", value=getattr(request, name))


def _check_geometry(card: Card, request: Request) -> None:
    multiple, stride = whole(card.settings, "size_multiple"), whole(card.settings, "frame_stride")
    for name in ("height", "width"):
        size = _integer(name, getattr(request, name), 1)
        if size % multiple:
            raise RequestError(
                f"{name} must be a multiple of {multiple}", value=size, remedy=f"nearest: {_nearest(size, multiple)}"
            )
    frames = _integer("num_frames", request.num_frames, 1)
    if (frames - 1) % stride:
        most = math.inf if request.video is None else request.video.shape[0]
        near = _nearest(frames - 1, stride, low=0, plus=1, most=most)
        raise RequestError(f"num_frames must be a multiple of {stride} plus 1", value=frames, remedy=f"nearest: {near}")
    if request.image is not None and request.image.shape[0] != 1:
        raise RequestError("an image is one frame", value=request.image.shape[0], remedy="give the first frame alone")
    if request.video is not None and request.video.shape[0] < frames:
        raise RequestError(
            f"the video has {request.video.shape[0]} frames, {frames} are asked for",
            remedy="give a longer video or fewer num_frames",
        )


def _check_schedule(card: Card, request: Request) -> None:
    steps = _integer("num_inference_steps", request.num_inference_steps, 1)
    if card.recipe.steps and steps not in card.recipe.steps:
        raise RequestError(
            f"{card.name} is {card.recipe.kind} for certain step counts, num_inference_steps is not one",
            value=steps,
            choices=card.recipe.steps,
        )
    if request.flow_shift is None and card.settings.get("train_steps") is not None:
        raise RequestError(f"{card.name} needs a flow_shift", remedy="give flow_shift=, or a default on the card")
    _number("strength", request.strength, 0.0, 1.0)
    if request.video is not None and int(steps * request.strength) == 0:
        least = min(1.0, math.ceil(1e6 / steps) / 1e6)  # rounded up, so that it is enough
        raise RequestError(f"strength {request.strength} of {steps} steps leaves none to run",
                           remedy=f"at least {least:g}")  # fmt: skip
    if request.flow_shift is not None and _number("flow_shift", request.flow_shift, 0.0, math.inf) == 0:
        raise RequestError("flow_shift must be above 0", value=request.flow_shift)


def _check_guidance(card: Card, request: Request) -> None:
    _number("guidance_scale", request.guidance_scale, 0.0, math.inf)
    if request.guidance_scale_2 is not None:
        _number("guidance_scale_2", request.guidance_scale_2, 0.0, math.inf)
        if card.settings.get("boundary") is None:
            raise RequestError(
                f"{card.name} has one expert and no guidance_scale_2",
                value=request.guidance_scale_2,
                remedy="leave it out",
            )


def _nearest(size: int, multiple: int, low: int = 1, plus: int = 0, most: float = math.inf) -> str:
    below = max(size // multiple, low) * multiple + plus
    above = (size // multiple + 1) * multiple + plus
    return f"{below}" if below >= above or above > most else f"{below} or {above}"


def _integer(name: str, value: object, low: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise RequestError(f"{name} must be a whole number of at least {low}", value=value)
    return value


def _number(name: str, value: object, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high or value == math.inf:
        limit = f"at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
        raise RequestError(f"{name} must be a number {limit}", value=value)
    return float(value)
