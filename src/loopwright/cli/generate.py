"""Generate a video, an image or latents from a prompt.

    loopwright generate loopwright/tiny-wan --prompt "a fox moving left on a blue background" --seed 7
    loopwright generate MODEL --prompt-file prompts.txt --output-path clips/
    loopwright generate --like outputs/a-fox-7.mp4

What is left out is the model's own default. The command line beats --config, which beats --like. Several prompts share
one seed. Results carry all that made them; --like repeats them.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from . import flags, report
from .chatter import quiet
from .flags import Flag
from .geometry import SIZE
from .outputs import LATENTS, STILL, VIDEO, rehearse
from .plan import Plan, plan_of

if TYPE_CHECKING:
    from ..api import Model, Result
    from ..request import Request

NAME, HELP = "generate", "generate a video, an image or latents from a prompt"
_MODEL = Flag("model", "a shipped id, a Diffusers folder or a hub name", metavar="MODEL", instead=("model_path",))
FLAGS = (
    Flag("model_path", "the same as MODEL", metavar="MODEL", instead=("model",)),
    Flag("revision", "branch, tag or commit of a hub name"),
    Flag("device", "auto (the fastest here), cpu, cuda, cuda:1 ..."),
    Flag("dtype", "precision of the generator, such as bfloat16"),
    Flag("memory", "auto, high (weights stay on the device) or low (they come when needed)"),
    Flag("graphs", "auto (always on CUDA), always or never: capture steps as CUDA graphs; the same bits, sooner"),
    Flag("compile", "compile the generator's blocks: sooner still, close to the same values", bool),
    Flag("sampler", "another sampler than the model's, such as euler"),
    Flag(
        "lora",
        "an adapter of the generator, FILE:0.8 to scale it; may be given again; for one of two experts NAME=FILE",
        metavar="FILE",
        many=True,
    ),
    Flag("threads", "CPU threads", int, metavar="N"),
    Flag("config", "YAML or JSON with the names of these flags", metavar="FILE", in_file=False),
    Flag("like", "repeat this result; other flags change it", metavar="FILE"),
    Flag(
        "prompt", "what to show; may be given again", group="input", metavar="TEXT", many=True, instead=("prompt_file",)
    ),
    Flag("prompt_file", "a prompt a line; # begins a comment", group="input", metavar="FILE", instead=("prompt",)),
    Flag("negative_prompt", "what to keep away from", group="input", metavar="TEXT"),
    Flag("image", "for image to video", group="input", metavar="FILE"),
    Flag("video", "for video to video", group="input", metavar="FILE"),
    Flag("task", "such as text_to_video; told from the inputs if left out", group="input"),
    *SIZE,
    Flag("num_inference_steps", "steps of denoising", int, "parameters", "N"),
    Flag("guidance_scale", "how closely to follow the prompt", float, "parameters", "X"),
    Flag("guidance_scale_2", "the same for a second expert", float, "parameters", "X"),
    Flag("flow_shift", "shift of the noise schedule", float, "parameters", "X"),
    Flag("strength", "of video to video, above 0 up to 1: how much of the schedule runs", float, "parameters", "X"),
    Flag("max_sequence_length", "tokens of a prompt", int, "parameters", "N"),
    Flag("fps", "frames per second of the file", int, "parameters", "N"),
    Flag("seed", "of every prompt; drawn and printed if left out", int, "parameters", "N"),
    Flag("mode", "exact (the default), fixed or throughput: whether steps may share calls", group="parameters"),
    Flag("rows", "of every call in fixed mode; repeats a served result", int, "parameters", "N"),
    Flag("noise_level", "of a stochastic sampler: how much noise its steps draw", float, "parameters", "X"),
    Flag("noise_start", "the first step that draws noise", int, "parameters", "N"),
    Flag("noise_steps", "how many steps draw noise; all but the last if left out", int, "parameters", "N"),
    Flag("attention", "sdpa (the default), math, flash, cudnn or fa3", group="parameters"),
    Flag("kernels", "plain (the default) or fused; loopwright backends lists what runs here", group="parameters"),
    Flag("output", "video (pixels) or latents", group="output"),
    Flag("output_path", "a file, or a folder; by default outputs/PROMPT-SEED.mp4", group="output", metavar="PATH"),
    Flag("contact_sheet", "also a grid of the frames: a file, or a folder", group="output", metavar="PATH"),
    Flag("quiet", "print the names of the files alone", bool, group="output"),
    Flag("json", "print each result's record, a line of JSON", bool, group="output"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("model", nargs="?", metavar=_MODEL.metavar, help=_MODEL.help)
    flags.add_arguments(parser, FLAGS)


def run(arguments: argparse.Namespace) -> int:
    """Generate, save and report each prompt, in turn or, where the mode lets steps share calls, together."""
    if arguments.config:
        known = (_MODEL, *FLAGS)
        flags.fill(arguments, flags.read_config(arguments.config, known), known)
    from .progress import progress

    with quiet():
        plan = plan_of(arguments)
        model, requests, seconds = _ready(arguments, plan)
        with progress(quiet=arguments.quiet, requests=len(requests)) as show:
            for index, result in enumerate(model.run_all(requests, listener=show.event)):
                files, encoding = _save(result, plan)
                spent = {"load": 0.0 if index else seconds, "generate": result.seconds, "encode": encoding}
                print(_report(arguments, files, result, spent, _usage(model), prompts=len(requests)), flush=True)
    if not arguments.quiet and model.graphs is not None:
        for reason in sorted(set(model.graphs.breaks.values())):
            print(f"steps ran without a graph: {reason}", file=sys.stderr, flush=True)
    return 0


def _ready(arguments: argparse.Namespace, plan: Plan) -> tuple["Model", list["Request"], float]:
    """The model with its weights read, and the requests. Nothing is read before every request is known to be good."""
    begun = time.perf_counter()
    if arguments.threads is not None:
        import torch

        torch.set_num_threads(arguments.threads)
    model = _load(arguments, plan)
    requests = [_request(model, prompt, plan) for prompt in plan.prompts]
    _read_weights(model, requests, arguments)
    others = ("model", "model_path", "revision", "dtype", "lora")
    if plan.past and not any(getattr(arguments, name) for name in others):
        plan.past.check_weights(model)
    return model, requests, time.perf_counter() - begun


def _load(arguments: argparse.Namespace, plan: Plan) -> "Model":
    """The model asked for, else the one of --like; that one must still be what it was."""
    from .. import api

    past, named = plan.past, arguments.model or arguments.model_path
    if past and not named and not arguments.revision:
        model = past.load(arguments.device, arguments.memory or "auto", arguments.lora)
        if not (arguments.dtype or arguments.sampler or arguments.graphs or arguments.compile):
            return model
    return api.load(
        named or (past.model if past else ""),
        revision=arguments.revision or (past.revision if past and not named else None),
        device=arguments.device or (past.device if past else "auto"),
        dtype=arguments.dtype or (past.dtypes if past else None),
        sampler=arguments.sampler or (past.sampler if past else None),
        memory=arguments.memory or "auto",
        graphs=arguments.graphs or "auto",
        compile=bool(arguments.compile or (past and not named and past.compile)),
        lora=arguments.lora or (past.lora if past and not named else ()),
    )


def _request(model: "Model", prompt: str, plan: Plan) -> "Request":
    """The request, known to fit the model, the files it repeats, and the file it goes to."""
    request = model.request(prompt, task=plan.task, **plan.media, **plan.parameters)  # type: ignore[arg-type]
    for name in plan.repeated:
        assert plan.past is not None
        plan.past.check_media(name, request.image if name == "image" else request.video)
    suffix = _suffix(request)
    plan.place.check(prompt, request.seed, suffix)
    record = model.record(request)
    rehearse(plan.place.file.suffix if plan.place.file else suffix, request.num_frames, request.fps, record)
    if plan.sheet and plan.sheet.file:
        rehearse(plan.sheet.file.suffix, 1, request.fps, record)
    return request


def _suffix(request: "Request") -> str:
    """Of a name of our own."""
    return LATENTS if request.output == "latents" else STILL if request.num_frames == 1 else VIDEO


def _read_weights(model: "Model", requests: Sequence["Request"], arguments: argparse.Namespace) -> None:
    """Read what the requests use now, rather than at each first use, so that it is not counted as generating."""
    from ..program import bind
    from .progress import progress

    stages = [bound.stage for request in requests for bound in bind(model.card, request, model.instance.loops)]
    names = list(dict.fromkeys(name for stage in stages for name in stage.uses))
    with progress(quiet=arguments.quiet) as show:
        for index, name in enumerate(names):
            show.loading(name, index + 1, len(names))
            model.instance.part(name)
    if not arguments.quiet:
        loaded = model.instance.store.loaded
        size = report.as_size(loaded.bytes)
        print(f"loaded {loaded.components} components, {size} in {loaded.seconds:.1f} s", file=sys.stderr, flush=True)


def _save(result: "Result", plan: Plan) -> tuple[list[Path], float]:
    """The files written, and the seconds that took. A name of our own is chosen only now, so that it is still free."""
    from .. import media

    begun, request = time.perf_counter(), result.request
    files = [result.save(plan.place.path(request.prompt, request.seed, _suffix(request)))]
    if plan.sheet and result.video is not None:
        sheet = plan.sheet.path(request.prompt, request.seed, STILL)
        media.write(sheet, media.contact_sheet(result.video), fps=request.fps, metadata=result.record)
        files.append(sheet)
    return files, time.perf_counter() - begun


def _usage(model: "Model") -> report.Usage:
    from ..backends.usage import peak_bytes

    return report.Usage(model.instance.memory, *peak_bytes(model.instance.binding.device))


def _report(
    arguments: argparse.Namespace,
    files: Sequence[Path],
    result: "Result",
    seconds: Mapping[str, float],
    usage: report.Usage,
    *,
    prompts: int,
) -> str:
    if arguments.json:
        return report.as_json(files, result.record, seconds, usage)
    if arguments.quiet:
        return "\n".join(map(str, files))
    notes = {"seed": f" (the same for all {prompts} prompts)"} if prompts > 1 else {}
    return report.as_text(files, result.record, seconds, usage, notes)
