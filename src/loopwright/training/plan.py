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

from .. import catalog, rewards
from ..api.model import sampler_of
from ..api.pixels import frames
from ..backends.capture import require_capture
from ..backends.compile import require_compiler
from ..backends.device import pick, preferred_dtype
from ..backends.precision import DTYPES, FLOAT8
from ..card import Card, experts
from ..data.buckets import choose
from ..data.cache import Cache
from ..data.dataset import read
from ..data.encodings import Encodings
from ..data.geometry import parse
from ..data.order import Order
from ..data.row import Row
from ..data.split import split
from ..distributed.group import local_size, size
from ..errors import BackendError, RequestError
from ..loops.denoise import SOLVERS
from ..loops.noise import with_noise
from ..program import resolve, validate
from ..request import KERNELS as PLAIN
from ..request import Request
from . import continuation, drawn, machine
from .drawn import Drawn
from .methods import POLICIES, autoencoder, sft
from .networks import adapt, outline, served
from .prompts import Prompt
from .prompts import read as prompts_of
from .rollout import Rollout
from .run import Data, Run
from .settings import naming

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


def make(run: Run, processes: int | None = None) -> Plan:
    """Check a run against this machine, its model's card, its encoders and its data; resolve what it leaves open.

    `processes` are to be started on this machine; None: those that this one was started with.

    Raises RequestError, CardError, WeightsError, BackendError, DataError or StateError, one line each.
    """
    device, here = pick(run.device), processes or local_size()
    processes = processes or size()
    run = _resolved(run, device, processes)
    card = catalog.find(run.model, revision=run.revision)
    validate(card, catalog.loops(card))
    roles = _roles(run, card, processes)
    machine.check(run, card, device, here=here)
    _check_adapters(run, card, roles)
    if run.method == "sft":
        sft.reached(card, roles, run.sft)
    continuation.check(run)
    plan = Plan(run, card, roles, (), None, (), None, 0, 0, _previews(run, card))
    if run.rollout is not None:
        plan = _rollout(plan, run.rollout, processes)
    else:
        plan = _drawn(plan, run.drawn, processes) if run.drawn else _encoded(plan, device, processes)
    if run.schedule.warmup > plan.steps:
        remedy = f"the run has {plan.steps} steps: lower it, or give more"
        raise RequestError("schedule.warmup does not end within the run", value=run.schedule.warmup, remedy=remedy)
    return plan


def _drawn(plan: Plan, source: Drawn, processes: int) -> Plan:
    """The plan of a run whose batches its own file draws."""
    run = plan.run
    assert run.steps is not None, "a run has settled it"
    drawn.function(source)
    drawn.each(run.rows, processes, run.accumulate)
    return replace(plan, steps=run.steps, epochs=1)


def _encoded(plan: Plan, device: str, processes: int) -> Plan:
    """The plan of a run that trains on a data set's encodings."""
    run, data = plan.run, plan.run.data
    assert data is not None, "a run has settled it"
    machine.check_workers(data, device, processes=processes)
    encodings = encoded(data, "cuda:0" if device == "cuda" else device)  # as each process has it
    _check_encoders(plan.card, encodings.card)
    rows, held = split(read(data.dataset), data.held_out, run.seed)
    order = _order(encodings, rows, run)
    each = len(order.epoch(0))
    epochs = run.epochs or -(-(run.steps or 0) // each)
    steps = run.steps or epochs * each
    after = _order(encodings, held, run) if held else None
    return replace(plan, rows=rows, order=order, held_rows=held, held=after, steps=steps, epochs=epochs)


def _rollout(plan: Plan, rollout: Rollout, processes: int) -> Plan:
    """The plan of a run that learns from its own samples."""
    run = plan.run
    if rollout.groups % processes:
        remedy = f"{processes} have it"
        raise RequestError("rollout.groups are shared out to processes", value=rollout.groups, remedy=remedy)
    if run.parallel != "shard" and run.precision != "float32":
        remedy = "set precision to float32 or parallel to shard, so that training computes what sampling does"
        raise RequestError("rollouts with whole weights in each process", value=run.precision, remedy=remedy)
    if rollout.engines:
        _check_engines(rollout.engines, pick(run.device), processes)
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


def _check_engines(engines: int, device: str, processes: int) -> None:
    """Raise where engines of their own cannot be had."""
    if processes > 1:
        remedy = "train in one process, or set rollout.engines to 0"
        raise RequestError("rollout.engines are one training process's", value=f"{processes} processes", remedy=remedy)
    if importlib.util.find_spec("ray") is None:
        raise BackendError("rollout.engines cannot be had", value="ray", remedy="pip install 'loopwright[train]'")
    if device.startswith("cuda") and torch.cuda.device_count() <= engines:
        what = f"{engines} engines and {torch.cuda.device_count()} GPUs"
        raise BackendError("rollout.engines need a GPU each beside this one's", value=what, remedy="ask for fewer")


def _noise(rollout: Rollout) -> dict[str, int]:
    return {} if rollout.window is None else {"noise_steps": rollout.window}


def encoded(data: Data, device: str, say: Say = lambda line: None) -> Encodings:
    """The encodings of a run's data, on a process's device. Raises as `Encodings` does, before any weight is read."""
    with naming("data.geometry"):
        shapes = parse(data.geometry, data.frame_stride, data.crop)
    return Encodings(
        Cache(data.cache),
        data.encoder_checkpoint,
        shapes,
        revision=data.encoder_revision,
        first_frame=data.first_frame,
        device=device.partition(":")[0] if data.dedicated else device,
        workers=data.workers,
        dedicated=data.dedicated,
        park=data.park,
        say=say,
    )


def _resolved(run: Run, device: str, processes: int) -> Run:
    lr = run.optimiser.lr or (1e-5 if run.lora is None else 1e-4 if run.rollout is None else 3e-4)
    precision = preferred_dtype(device) if run.precision == "auto" else run.precision
    overlaps = run.rollout is not None and run.rollout.staleness > 0
    sleep = run.sleep or ("nobody" if overlaps else "serving")
    rollout = None if run.rollout is None else replace(run.rollout, graphs=_graphs(run, run.rollout, device, processes))
    optimiser = replace(run.optimiser, lr=lr)
    return replace(run, precision=precision, sleep=sleep, optimiser=optimiser, rollout=rollout)  # type: ignore[arg-type]


def _graphs(run: Run, rollout: Rollout, device: str, processes: int) -> Literal["always", "never"]:
    """Raises BackendError where they are asked for and the device has none."""
    elsewhere = rollout.staleness or rollout.engines  # in another thread, or not on this device
    parted = processes > 1 and run.parallel == "shard"  # perhaps because no process has room for all of it
    can = device.startswith("cuda") and not (elsewhere or parted)
    if rollout.graphs == "never" or (rollout.graphs == "auto" and not can):
        return "never"
    require_capture(device)
    return "always"


def _roles(run: Run, card: Card, processes: int) -> tuple[str, ...]:
    if run.method == "autoencoder":
        return (_autoencoder(run, card, processes),)
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


def _autoencoder(run: Run, card: Card, processes: int) -> str:
    if processes > 1 and run.parallel == "shard":
        remedy = "set parallel to replicate, or train in one process"
        raise RequestError("an autoencoder is not sharded", value=f"{processes} processes", remedy=remedy)
    if autoencoder.ROLE not in card.components:
        raise RequestError(f"{card.name} has no such component", value=autoencoder.ROLE, choices=card.components)
    return autoencoder.ROLE


def _check_adapters(run: Run, card: Card, roles: tuple[str, ...]) -> None:
    """On shapes alone: an unmatched pattern is known before weights are read."""
    if run.lora is not None:
        for role in roles:
            network = outline(card, role)
            with naming("lora.targets"):
                adapt(network, run.lora, run.seed)


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
