"""A run from beginning to end in one process of its group: encodings, networks, steps, what it leaves.

    outcome = train(read("runs/fox.yaml"))       # continues what lies in run.output
    outcome.finished, outcome.step

Started in several processes by torchrun or `distributed.launch`, all of them call this.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import nn

from .. import catalog
from ..backends.device import pick
from ..backends.precision import torch_dtype
from ..distributed.group import Group, joined
from ..distributed.shard import trained
from ..files import replacing
from ..request import KERNELS
from ..rewards import Composite
from . import export, networks, summary
from .ahead import Ahead
from .behaviour import Behaviour
from .checkpoint import Checkpoints
from .continuation import RUN
from .engines import Engines
from .feed import Prepared, prepare
from .held_out import HeldOut
from .interrupt import asked
from .live import Live
from .methods import METHODS, Material, Policy
from .methods.batch import Velocity
from .plan import Plan, encoded, make
from .previews import Previews
from .rollout_feed import Epochs, RolloutFeed
from .rollouts import Rollouts
from .run import Run, text
from .sinks import Sink, opened
from .supply import Supply
from .supply import opened as opened_supply
from .trainer import Trainer


class Display(Protocol):
    """Who is told how a run goes."""

    def say(self, line: str) -> None:
        """Something worth a line."""

    def step(self, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        """So many steps are done, the last with these metrics."""

    def encoding(self, done: int, total: int) -> None:
        """So many rows have been looked up, or encoded."""


class Silent:
    """Tells nobody."""

    def say(self, line: str) -> None: ...

    def step(self, step: int, steps: int, metrics: Mapping[str, float]) -> None: ...

    def encoding(self, done: int, total: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """Whether a run came to its end or was interrupted, and after which step; `result` is what it left."""

    finished: bool
    step: int
    result: Path | None


def train(run: Run, display: Display | None = None) -> Outcome:
    """Train, or continue. Raises what `plan.make` does before anything is written, ModelError for a loss not finite."""
    plan = make(run)
    with joined(pick(run.device)) as group:
        shown = display if display is not None and group.first else Silent()
        return Session(plan, group, shown).run()


class Session:
    """The parts of a run, put together."""

    def __init__(self, plan: Plan, group: Group, display: Display) -> None:
        self.plan, self._group, self._display = plan, group, display
        self._live: Live | None = None
        self._rollouts: Rollouts | None = None
        self._held: HeldOut | None = None

    def run(self) -> Outcome:
        """All of it."""
        plan, group = self.plan, self._group
        prepared = self._encode()
        with opened_supply(plan, group, self._display.say) as supply, ExitStack() as ending:
            trainer = self._trainer(supply, ending)
            if trainer.resume(self._display.say):
                self._display.say(f"continuing after step {trainer.step} of {trainer.steps}")
            self._claim()
            finished = self._trained(trainer, prepared)
        if group.first:
            summary.write(plan)
        return Outcome(finished, trainer.step, self._leave(trainer) if finished else None)

    def _claim(self) -> None:
        """The folder is this run's, which nothing can refuse any more."""
        if self._group.first:
            with replacing(self.plan.output / RUN) as temporary:
                temporary.write_text(text(self.plan.run), encoding="utf-8")

    def _encode(self) -> Prepared:
        """With encodings of their own, so that the encoders are gone from the device before training begins."""
        if self.plan.run.data is None:
            return Prepared(0, 0.0)
        with encoded(self.plan.run.data, str(self._group.device), self._display.say) as encodings:
            return prepare(encodings, [*self.plan.rows, *self.plan.held_rows], self._group, self._display.encoding)

    def _trainer(self, supply: Supply, ending: ExitStack) -> Trainer:
        plan, group, run = self.plan, self._group, self.plan.run
        loaded = networks.load(plan.card, plan.roles, run, group)
        self._live = Live(plan, group, loaded)
        method = METHODS[run.method](run, self._material(supply, loaded))
        feed, kept = supply.feed, dict[str, torch.Tensor]()
        if supply.score is not None:
            policy = cast(Policy, method)
            self._rollouts, source, behind = self._sampled(self._live, policy, supply.score, loaded, ending)
            feed, kept = RolloutFeed(source, policy, plan, group), {**policy.tensors(), **behind}
            scores = {"reward": supply.score} | ({"judge": supply.judges} if supply.judges else {})
            for each in scores.values():
                self._live.turns.serves(each.sleep)
            if run.evaluation is not None:
                self._held = HeldOut(plan, group, self._live, scores, sampler=self._rollouts.sampler,
                                     say=self._display.say)  # fmt: skip
        assert feed is not None, "what has no feed has a score"
        trainer = Trainer(
            run,
            group,
            loaded,
            method,
            feed,
            steps=plan.steps,
            epochs=plan.epochs,
            hold=_holding(plan),
            checkpoints=Checkpoints(plan.output / "checkpoints", run.checkpoints.keep, group),
            held=supply.held,
            kept=kept,
        )
        self._live.turns.trains(trainer.idle())
        return trainer

    def _sampled(
        self, live: Live, policy: Policy, score: Composite, loaded: Mapping[str, nn.Module], ending: ExitStack
    ) -> tuple[Rollouts, Epochs, Mapping[str, torch.Tensor]]:
        """Rollouts, where epochs come from, perhaps before they are asked for, and what a checkpoint keeps of that."""
        plan, group, say = self.plan, self._group, self._display.say
        assert plan.run.rollout is not None
        sampler, engines, serving = plan.run.rollout.sampler or policy.sampler, None, None
        if plan.run.rollout.engines:
            engines = ending.enter_context(closing(Engines(plan, group, sampler)))
            serving = partial(engines.after, loaded)
        rollouts = Rollouts(plan, group, live, policy, score, say=say, serving=serving)
        if not plan.run.rollout.staleness:
            return rollouts, rollouts, {}
        behaviour = Behaviour(plan, group, live, loaded, sampler=sampler, engines=engines)
        ahead = ending.enter_context(closing(Ahead(rollouts, policy, behaviour, group, epochs=plan.epochs)))
        return rollouts, ahead, behaviour.tensors()

    def _material(self, supply: Supply, loaded: Mapping[str, nn.Module]) -> Material:
        plan, run = self.plan, self.plan.run
        return Material(
            plan.card,
            _forward(plan, self._group),
            plan.roles,
            torch_dtype(run.precision),
            run.attention,
            supply.blank,
            trained(loaded),
            plan.asked,
        )

    def _trained(self, trainer: Trainer, prepared: Prepared) -> bool:
        """Whether the end was reached."""
        plan, group = self.plan, self._group
        previews = Previews(plan, group, self._live) if plan.previews and self._live else None
        sinks = opened(plan.run, plan.output, trainer.step) if group.first else []
        try:
            return self._steps(trainer, sinks, prepared, previews)
        finally:
            for sink in sinks:
                sink.close()

    def _steps(self, trainer: Trainer, sinks: list[Sink], prepared: Prepared, previews: Previews | None) -> bool:
        """Whether the end was reached."""
        extra: dict[str, float] = {"cache_misses": prepared.misses, "encode_seconds": prepared.seconds}
        if trainer.step == 0:
            self._begin(trainer, sinks, previews)
        with asked() as stop:
            for metrics in trainer.train():
                measured = {**metrics, **self._due(trainer)}
                if measured:
                    measured, extra = {**measured, **extra}, {}
                    for sink in sinks:
                        sink.write(trainer.step, measured)
                    self._display.step(trainer.step, trainer.steps, measured)
                # no rollout is kept, so a run that learns from them stops where the next begins
                stopped = self._group.any(stop()) and (self._rollouts is None or trainer.position.offset == 0)
                last = trainer.step >= trainer.steps
                if last or stopped or trainer.step % self.plan.run.checkpoints.every == 0:
                    trainer.save()
                if previews is not None and (last or trainer.step % previews.every == 0):
                    previews.make(trainer.step)
                if stopped and not last:
                    return False
        return True

    def _begin(self, trainer: Trainer, sinks: list[Sink], previews: Previews | None) -> None:
        """What the networks are before they are trained, to compare with."""
        if self.plan.run.evaluation:
            measured = self._evaluated(trainer)
            for sink in sinks:
                sink.write(0, measured)
        if previews is not None:
            previews.make(0)

    def _due(self, trainer: Trainer) -> dict[str, float]:
        """What is measured only now and then."""
        evaluation = self.plan.run.evaluation
        if evaluation and (trainer.step % evaluation.every == 0 or trainer.step == trainer.steps):
            return self._evaluated(trainer)
        return {}

    def _evaluated(self, trainer: Trainer) -> dict[str, float]:
        """By rewards where there are rollouts, else by the loss; averaged weights, too, where there are any."""
        if self._held is None:
            return trainer.evaluate()
        measured = self._held.measure(trainer.step)
        if trainer.average is None:
            return measured
        with trainer.averaged():
            return measured | self._held.measure(trainer.step, which="ema_")

    def _leave(self, trainer: Trainer) -> Path:
        """The trained weights, and the averaged ones beside them."""
        result = self._export(trainer, "")
        if trainer.average is not None:
            with trainer.averaged():
                self._export(trainer, "-ema")
        return result

    def _export(self, trainer: Trainer, suffix: str) -> Path:
        lora = self.plan.run.lora
        path = self.plan.output / f"{'model' if lora is None else 'lora'}{suffix}"
        if lora is None:
            export.whole_model(self.plan, trainer.networks, self._group, path)
        else:
            export.adapters(trainer.networks, self._group, path, lora)
        return path


def _forward(plan: Plan, group: Group) -> Velocity:
    """The forward that serving runs, in the run's precision."""
    forward, compute = catalog.velocity(plan.card), torch_dtype(plan.run.precision)
    if networks.sharded(plan.run, group) or compute == torch.float32:
        return forward

    def lowered(*given: object, **named: object) -> torch.Tensor:
        with torch.autocast(group.device.type, compute):
            return forward(*given, **named)

    return lowered


def _holding(plan: Plan) -> Callable[[nn.Module], AbstractContextManager[None]]:
    """A network's choice of kernels, held: recomputation in the backward pass then takes the same."""
    if plan.run.method == "autoencoder":
        return lambda network: nullcontext()
    bound = catalog.binding(plan.card)
    return lambda network: bound(network, plan.run.attention, KERNELS)
