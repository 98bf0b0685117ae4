"""What a run will do, decided and checked before any weight is read or file written.

    plan = make(run)
    plan.run            # with every "auto" resolved
    plan.steps          # optimiser steps in all
    plan.roles          # the networks trained, by their names on the card

Reads configurations and the data set: captions, sizes and content hashes of media. Nothing is loaded.
"""

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import yaml  # type: ignore[import-untyped]

from .. import catalog, rewards
from ..api.model import sampler_of
from ..api.pixels import frames
from ..backends.capture import require_capture
from ..backends.compile import require_compiler
from ..backends.device import pick, preferred_dtype, probe
from ..backends.precision import DTYPES, FLOAT8
from ..backends.registry import ATTENTIONS, KERNELS, require
from ..card import Card, experts
from ..data.buckets import choose
from ..data.cache import Cache
from ..data.dataset import read
from ..data.encodings import Encodings
from ..data.geometry import parse
from ..data.order import Order
from ..data.row import Row
from ..data.split import split
from ..distributed.group import size
from ..errors import BackendError, RequestError, StateError
from ..loops.denoise import SOLVERS
from ..loops.noise import with_noise
from ..program import resolve, validate
from ..request import KERNELS as PLAIN
from ..request import Request
from . import drawn
from .methods import POLICIES, autoencoder
from .networks import adapt, outline, served
from .prompts import Prompt
from .prompts import read as prompts_of
from .rollout import Rollout
from .run import Data, Run
from .settings import leaves, plain

RUN = "run.yaml"
# What may differ between a run and its continuation: nothing that a step computed so far depends on.
_LENGTH, _RESULT = ("steps", "epochs"), ("output", "stored", "lora.layout", "sinks", "log_every")
_PLACE = ("rollout.prompts", "rollout.held_out", "rollout.graphs", "rollout.engines", "sleep", "device", "train_only")
_FREE = (*_LENGTH, *_RESULT, *_PLACE, "checkpoints", "evaluation", "previews")
_PLOTS = "matplotlib"
_SAME = ("channels", "spatial_stride", "frame_stride")  # settings that a model and its encoders must share
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """A run with everything it needs to know.

    `held` is None where no rows are held out; a run whose batches are drawn or whose samples are its own has no rows
    and no order. Rollouts ask what is `asked`, with the `prompts` and seeds of an epoch; `judged` are held out, and
    asked what is `quiet`, without noise in the steps.
    """

    run: Run
    card: Card
    roles: tuple[str, ...]
    rows: Sequence[Row]
    order: Order | None
    held_rows: Sequence[Row]
    held: Order | None
    steps: int
    epochs: int
    previews: tuple[Request, ...]
    asked: Request | None = None
    quiet: Request | None = None
    prompts: tuple[Prompt, ...] = ()
    judged: tuple[Prompt, ...] = ()

    @property
    def output(self) -> Path:
        """The run's folder."""
        return Path(self.run.output).expanduser()


def make(run: Run) -> Plan:
    """Check a run against this machine, its model's card, its encoders and its data; resolve what it leaves open.

    Raises RequestError, CardError, WeightsError, BackendError, DataError or StateError, one line each.
    """
    device = pick(run.device)
    run = _resolved(run, device)
    card = catalog.find(run.model, revision=run.revision)
    validate(card, catalog.loops(card))
    roles = _roles(run, card)
    _check_machine(run, card, device)
    _check_adapters(run, card, roles)
    _check_output(run)
    previews = _previews(run, card)
    if run.rollout is not None:
        return _rollout(Plan(run, card, roles, (), None, (), None, 0, 0, previews), run.rollout)
    if run.data is None:
        assert run.drawn is not None and run.steps is not None, "a run has settled it"
        drawn.function(run.drawn)
        return Plan(run, card, roles, (), None, (), None, run.steps, 1, previews)
    encodings = encoded(run.data, device)
    _check_encoders(card, encodings.card)
    rows, held = split(read(run.data.dataset), run.data.held_out, run.seed)
    order = _order(encodings, rows, run)
    each = len(order.epoch(0))
    epochs = run.epochs or -(-(run.steps or 0) // each)
    steps = run.steps or epochs * each
    after = _order(encodings, held, run) if held else None
    return Plan(run, card, roles, rows, order, held, after, steps, epochs, previews)


def _rollout(plan: Plan, rollout: Rollout) -> Plan:
    """The plan of a run that learns from its own samples."""
    run = plan.run
    if rollout.groups % size():
        raise RequestError(
            "rollout.groups are shared out to processes", value=rollout.groups, remedy=f"{size()} have it"
        )
    if run.parallel != "shard" and run.precision != "float32":
        remedy = "set precision to float32 or parallel to shard, so that training computes what sampling does"
        raise RequestError("rollouts with whole weights in each process", value=run.precision, remedy=remedy)
    if rollout.engines:
        _check_engines(rollout.engines, pick(run.device))
    prompts = prompts_of(rollout.prompts)
    judged = prompts if rollout.held_out is None else prompts_of(rollout.held_out)
    nothing = torch.empty(0, 0, 0, 3, dtype=torch.uint8)
    with closing(rewards.parse(run.rewards)) as score:
        score.require([rewards.Sample(each.text, nothing, each.facts) for each in (*prompts, *judged)])
    if run.evaluation and run.evaluation.judges:
        with closing(rewards.judges(run.evaluation.judges, run.rewards)) as judges:
            judges.require([rewards.Sample(each.text, nothing, each.facts) for each in judged])
    _check_dtype(plan.card, rollout)
    if rollout.compile:
        require_compiler(pick(run.device))
    policy = POLICIES[run.method]
    sampler = rollout.sampler or policy.sampler
    card = served(plan.card, sampler)
    validate(card, catalog.loops(card))
    given = {"prompt": prompts[0].text, "seed": 0, **rollout.sharing}
    usual = {"attention": run.attention, **policy.usual, **rollout.parameters}
    asked = resolve(card, **{**usual, **given, **_noise(rollout)})  # type: ignore[arg-type]
    stepper = SOLVERS[sampler_of(card)].stepper
    if policy.noisy and not stepper:
        choices = [name for name, solver in SOLVERS.items() if solver.stepper]
        raise RequestError(
            f"{run.method} learns from noise, and the sampler draws none", value=sampler, choices=choices
        )
    asked, last = with_noise(asked, stepper), asked.num_inference_steps - 1
    if rollout.engines:
        _check_exact(run, asked)
    if rollout.window is not None and rollout.window > last:
        raise RequestError("rollout.window leaves no step without noise", value=rollout.window, remedy=f"1 to {last}")
    each = rollout.samples // run.rows
    steps = run.steps or (run.epochs or 0) * each
    plan = replace(plan, steps=steps, epochs=steps // each, asked=asked, prompts=prompts, judged=judged)
    if run.evaluation is None:
        return plan
    without = {name: value for name, value in usual.items() if name not in ("noise_start", "noise_steps")}
    quiet = resolve(card, **{**without, **run.evaluation.parameters, **given})  # type: ignore[arg-type]
    return replace(plan, quiet=replace(quiet, noise_steps=0) if stepper else quiet)


def _check_exact(run: Run, asked: Request) -> None:
    """Raise where log-probs would not be training's: how far apart they are is measured in this process alone."""
    ours, theirs = (run.attention, PLAIN), (asked.attention, asked.kernels)
    if ours != theirs:
        remedy = "leave attention and kernels out of rollout.parameters, or set rollout.engines to 0"
        raise RequestError("rollout.engines compute as training does", value=theirs, choices=(ours,), remedy=remedy)


def _check_dtype(card: Card, rollout: Rollout) -> None:
    """Networks in training have the run's precision."""
    others = [name for name, component in card.components.items() if component.dtype and name not in experts(card)]
    for name, value in rollout.dtype.items():
        if name not in others:
            raise RequestError("rollout.dtype: no such encoder or autoencoder", value=name, choices=others)
        if value not in DTYPES or value == FLOAT8:
            raise RequestError(f"rollout.dtype.{name}: no such precision", value=value, choices=DTYPES[:-1])


def _check_engines(engines: int, device: str) -> None:
    """Raise where engines of their own cannot be had."""
    if size() > 1:
        remedy = "train in one process, or set rollout.engines to 0"
        raise RequestError("rollout.engines are one training process's", value=f"{size()} processes", remedy=remedy)
    if importlib.util.find_spec("ray") is None:
        raise BackendError("rollout.engines cannot be had", value="ray", remedy="pip install 'loopwright[train]'")
    if device.startswith("cuda") and torch.cuda.device_count() <= engines:
        what = f"{engines} engines and {torch.cuda.device_count()} GPUs"
        raise BackendError("rollout.engines need a GPU each beside this one's", value=what, remedy="ask for fewer")


def _noise(rollout: Rollout) -> dict[str, int]:
    return {} if rollout.window is None else {"noise_steps": rollout.window}


def encoded(data: Data, device: str, say: Say = lambda line: None) -> Encodings:
    """The encodings of a run's data. Raises as `Encodings` does, before any weight is read."""
    shapes = parse(data.geometry, data.frame_stride, data.crop)
    checkpoint, revision = data.encoder_checkpoint, data.encoder_revision
    return Encodings(
        Cache(data.cache),
        checkpoint,
        shapes,
        revision=revision,
        first_frame=data.first_frame,
        device=device,
        say=say,
    )


def _resolved(run: Run, device: str) -> Run:
    lr = run.optimiser.lr or (1e-5 if run.lora is None else 1e-4 if run.rollout is None else 3e-4)
    precision = preferred_dtype(device) if run.precision == "auto" else run.precision
    overlaps = run.rollout is not None and run.rollout.staleness > 0
    sleep = run.sleep or ("nobody" if overlaps else "serving")
    rollout = None if run.rollout is None else replace(run.rollout, graphs=_graphs(run, run.rollout, device))
    optimiser = replace(run.optimiser, lr=lr)
    return replace(run, precision=precision, sleep=sleep, optimiser=optimiser, rollout=rollout)  # type: ignore[arg-type]


def _graphs(run: Run, rollout: Rollout, device: str) -> Literal["always", "never"]:
    """Raises BackendError where they are asked for and the device has none."""
    elsewhere = rollout.staleness or rollout.engines  # in another thread, or not on this device
    parted = size() > 1 and run.parallel == "shard"  # perhaps because no process has room for all of it
    can = device.startswith("cuda") and not (elsewhere or parted)
    if rollout.graphs == "never" or (rollout.graphs == "auto" and not can):
        return "never"
    require_capture(device)
    return "always"


def _roles(run: Run, card: Card) -> tuple[str, ...]:
    if run.method == "autoencoder":
        return (_autoencoder(run, card),)
    names = experts(card)
    if unknown := [name for name in run.train if name not in names]:
        raise RequestError("train names no network that generates", value=unknown[0], choices=names)
    if run.data is None:
        return tuple(name for name in names if not run.train or name in run.train)
    inputs = [program.inputs for program in card.programs.values()]
    if run.data.first_frame and ("image",) not in inputs:
        raise RequestError(f"data.first_frame: {card.name} takes no image", value=True, choices=card.programs)
    if not run.data.first_frame and () not in inputs:
        raise RequestError(f"data.first_frame: {card.name} needs an image", value=False, remedy="set it to true")
    return tuple(name for name in names if not run.train or name in run.train)


def _autoencoder(run: Run, card: Card) -> str:
    if size() > 1 and run.parallel == "shard":
        remedy = "set parallel to replicate, or train in one process"
        raise RequestError("an autoencoder is not sharded", value=f"{size()} processes", remedy=remedy)
    if autoencoder.ROLE not in card.components:
        raise RequestError(f"{card.name} has no such component", value=autoencoder.ROLE, choices=card.components)
    return autoencoder.ROLE


def _check_machine(run: Run, card: Card, device: str) -> None:
    if run.precision not in card.recipe.precision:
        raise RequestError(
            f"precision: {card.name} does not run in it", value=run.precision, choices=card.recipe.precision
        )
    require(probe(device), run.precision, attention=run.attention)
    if run.compile:
        require_compiler(device)
    if not KERNELS[run.attention].backward:
        choices = [name for name in ATTENTIONS if KERNELS[name].backward]
        raise BackendError("attention has no backward pass", value=run.attention, choices=choices)
    if device.startswith("cuda:") and size() > 1:
        raise RequestError("device names one of several", value=device, remedy="write cuda: each process takes its own")
    for package in (_PLOTS, *run.sinks):
        if importlib.util.find_spec(package) is None:
            what = "the summary's plots" if package == _PLOTS else f"sinks: {package}"
            extra = "train" if package in (_PLOTS, "tensorboard") else package
            raise BackendError(f"{what} cannot be had", value=package, remedy=f"pip install 'loopwright[{extra}]'")


def _check_adapters(run: Run, card: Card, roles: tuple[str, ...]) -> None:
    """On shapes alone: an unmatched pattern is known before weights are read."""
    if run.lora is not None:
        for role in roles:
            adapt(outline(card, role), run.lora, run.seed)


def _check_output(run: Run) -> None:
    """Raise StateError where the folder holds a run that this one does not continue."""
    output = Path(run.output).expanduser()
    if output.exists() and not output.is_dir():
        raise RequestError("output is not a folder", value=run.output)
    try:
        before = yaml.safe_load((output / RUN).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise StateError(f"{output / RUN} cannot be read ({error})", remedy="choose another output") from error
    now, was = leaves(plain(run)), leaves(before)
    for name in dict.fromkeys((*now, *was)):
        if not {name, name.split(".")[0]} & {*_FREE} and now.get(name) != was.get(name):
            remedy = f"it was {was.get(name)!r}: set it back to continue that run, or choose another output"
            raise StateError(f"{output} holds a run with another {name}", value=now.get(name), remedy=remedy)


def _previews(run: Run, card: Card) -> tuple[Request, ...]:
    if run.previews is None:
        return ()
    given = {"seed": run.previews.seed, "attention": run.attention, **run.previews.parameters}
    image, inputs = run.previews.image, [program.inputs for program in card.programs.values()]
    if image is not None and ("image",) not in inputs:
        raise RequestError(f"previews.image: {card.name} takes no image", value=image, choices=card.programs)
    if image is None and () not in inputs:
        raise RequestError(f"previews.image: {card.name} needs an image", remedy="give its path")
    opening = frames(image, still=True)
    return tuple(
        resolve(card, prompt=prompt, image=opening, **given)  # type: ignore[arg-type]
        for prompt in run.previews.prompts
    )


def _check_encoders(card: Card, encoder: Card) -> None:
    for name in ("family", *_SAME):
        ours = card.family if name == "family" else card.settings.get(name)
        theirs = encoder.family if name == "family" else encoder.settings.get(name)
        if ours != theirs:
            raise RequestError(
                f"data.encoder_checkpoint: its {name} is not the model's {ours!r}",
                value=theirs,
                remedy="name encoders of the model's own kind",
            )


def _order(encodings: Encodings, rows: Sequence[Row], run: Run) -> Order:
    keys = [encodings.keys(row) for row in rows]
    names = ["/".join(key.name for key in each.values()) for each in keys]
    shapes = [(choose(row, encodings.allowed), *each) for row, each in zip(rows, keys, strict=True)]
    return Order(names, shapes, run.rows, run.seed)
