"""What a `generate` command asks for, checked as far as it can be without a model.

    plan = plan_of(arguments)         # a RequestError or MediaError now, rather than after the work
    plan.prompts, plan.parameters, plan.place

Deliberately absent: what depends on the model, such as sizes it can make.
"""

import argparse
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import RequestError
from ..request import OUTPUTS
from .flags import read_text
from .outputs import LATENTS, STILL, VIDEO, Place, place_of
from .past import Parameter, Past, read

NUMBERS = (
    *("negative_prompt", "height", "width", "num_frames", "num_inference_steps", "guidance_scale", "guidance_scale_2"),
    *("flow_shift", "strength", "max_sequence_length", "fps", "seed", "mode", "rows", "attention", "kernels"),
    *("noise_level", "noise_start", "noise_steps"),
)
_MEDIA = ("image", "video")
_PATHS = ("config", "like", "prompt_file", "output_path", "contact_sheet", *_MEDIA)


@dataclass(frozen=True, slots=True)
class Plan:
    """`parameters` are those not left to the card, the seed always among them; `repeated` names the media of `past`."""

    prompts: tuple[str, ...]
    task: str | None
    parameters: Mapping[str, Parameter]
    media: Mapping[str, str | None]
    repeated: tuple[str, ...]
    past: Past | None
    place: Place
    sheet: Place | None

    @property
    def seed(self) -> int:
        """The seed of every prompt."""
        return int(self.parameters["seed"] or 0)


def plan_of(arguments: argparse.Namespace) -> Plan:
    """Read the files that the arguments name and put everything together."""
    _check(arguments)
    past = read(arguments.like) if arguments.like else None
    prompts = _prompts(arguments, past)
    place = _place(arguments, "output_path", prompts) or Place(Path("outputs"))
    sheet = _place(arguments, "contact_sheet", prompts)
    parameters = _parameters(arguments, past, place)
    new = [name for name in _MEDIA if getattr(arguments, name)]
    repeated = tuple(name for name in past.digests if name not in new) if past else ()
    media = {name: past.source(name) if past and name in repeated else getattr(arguments, name) for name in _MEDIA}
    task = arguments.task or (past.task if past and not new else None)
    plan = Plan(prompts, task, parameters, media, repeated, past, place, sheet)
    _check_files(plan)
    return plan


def _check(arguments: argparse.Namespace) -> None:
    """What can be said of the flags alone."""
    for name in _PATHS:
        if getattr(arguments, name) == "":
            raise RequestError(f"--{name.replace('_', '-')} is empty", remedy="give a path, or leave it out")
    if arguments.model and arguments.model_path and arguments.model != arguments.model_path:
        raise RequestError("two models", value=f"{arguments.model} and {arguments.model_path}", remedy="name one")
    if not (arguments.model or arguments.model_path or arguments.like):
        raise RequestError("no model", remedy="name one, such as loopwright/tiny-wan; loopwright models lists more")
    if arguments.output not in (None, *OUTPUTS):
        raise RequestError("unknown output", value=arguments.output, choices=OUTPUTS)
    if arguments.threads is not None and arguments.threads < 1:
        raise RequestError("threads must be at least 1", value=arguments.threads)


def _place(arguments: argparse.Namespace, name: str, prompts: tuple[str, ...]) -> Place | None:
    given, flag = getattr(arguments, name), "--" + name.replace("_", "-")
    return None if given is None else place_of(given, several=len(prompts) > 1, flag=flag)


def _prompts(arguments: argparse.Namespace, past: Past | None) -> tuple[str, ...]:
    prompts = [*(arguments.prompt or []), *(_lines(arguments.prompt_file) if arguments.prompt_file else [])]
    if not prompts and past is not None:
        prompts = [past.prompt]
    if not prompts:
        raise RequestError("no prompt", remedy='give --prompt "..." or --prompt-file')
    for text in (*prompts, arguments.negative_prompt or ""):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError("a prompt is not text in UTF-8", value=text) from error
    return tuple(prompts)


def _lines(file: str) -> list[str]:
    lines = [line.strip() for line in read_text(file).splitlines()]
    prompts = [line for line in lines if line and not line.startswith("#")]
    if not prompts:
        raise RequestError(f"{file} holds no prompt", remedy="write one a line; lines that begin with # are comments")
    return prompts


def _parameters(arguments: argparse.Namespace, past: Past | None, place: Place) -> dict[str, Parameter]:
    values: dict[str, Parameter] = {"seed": secrets.randbelow(2**32), **(past.parameters if past else {})}
    if arguments.mode not in (None, values.get("mode")):
        values.pop("rows", None)  # the other mode's
    values |= {name: value for name in NUMBERS if (value := getattr(arguments, name)) is not None}
    values["output"] = _output(arguments, place, values.get("output"))
    return values


def _output(arguments: argparse.Namespace, place: Place, before: Parameter) -> str:
    """What --output says, else what the file's suffix says, else what was made before."""
    named = None if place.file is None else "latents" if place.file.suffix == LATENTS else "video"
    output = str(arguments.output or named or before or "video")
    if named and output != named:
        choices = (LATENTS,) if output == "latents" else (VIDEO, STILL, ".gif", ".webp")
        raise RequestError(f"--output {output} needs another suffix", value=str(place.file), choices=choices)
    if output == "latents" and arguments.contact_sheet:
        raise RequestError("latents have no frames for a contact sheet", remedy="leave out --contact-sheet or --output")
    return output


def _check_files(plan: Plan) -> None:
    """The suffix of a name of our own may yet change with the number of frames, its folder not."""
    suffix = LATENTS if plan.parameters["output"] == "latents" else VIDEO
    for prompt in plan.prompts:
        plan.place.check(prompt, plan.seed, suffix)
        if plan.sheet:
            plan.sheet.check(prompt, plan.seed, STILL)
    sources = {f"--{name}": Path(file) for name, file in plan.media.items() if file}
    targets = {"--output-path": plan.place.file, "--contact-sheet": plan.sheet.file if plan.sheet else None}
    taken: dict[Path, str] = {file.resolve(): flag for flag, file in sources.items()}
    for flag, file in targets.items():
        if file and (other := taken.setdefault(file.resolve(), flag)) != flag:
            raise RequestError(f"{flag} is the file of {other}", value=str(file), remedy="name another file")
