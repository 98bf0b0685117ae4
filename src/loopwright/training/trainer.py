"""The trainer: steps, checkpoints, evaluation. It knows networks by their roles, and no method.

    trainer = Trainer(run, group, networks, method, feed, steps=1000, epochs=10, hold=hold, checkpoints=checkpoints)
    trainer.resume(say)
    for metrics in trainer.train():         # after each step
        ...

A step's loss is the mean over its rows, over all processes and accumulated parts; what is reported is what was
differentiated. Between two measurements, `run.log_every` steps apart, nothing waits for the device. Deliberately
absent: where batches come from, what a loss is, who is told.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from types import MappingProxyType

import torch
from torch import nn

from ..backends.usage import peak_bytes
from ..data.order import Position
from ..distributed.group import Group
from ..distributed.replicate import average_gradients
from ..distributed.shard import trained
from ..errors import ModelError
from . import optimise
from .checkpoint import Checkpoints, Say
from .feed import Batches, Step
from .methods import Method, Moment
from .noise import generator
from .run import Run
from .tally import Tally

Hold = Callable[[nn.Module], AbstractContextManager[None]]
Metrics = dict[str, float]


@dataclass
class Since:
    """What has come together since it was last measured."""

    tally: Tally = field(default_factory=Tally)
    norms: list[torch.Tensor] = field(default_factory=list)
    rows: int = 0
    steps: int = 0
    last: int = 0
    seconds: float = 0.0
    metrics: list[Mapping[str, float]] = field(default_factory=list)


class Trainer:
    """Optimises networks. `hold` keeps a network's choice of kernels over forward and backward pass; `kept` is what
    else a checkpoint holds.

    Attributes:
        step: how many are done.
        position: where in the data the next one begins.
        seen: how many rows have been trained on.
    """

    def __init__(
        self,
        run: Run,
        group: Group,
        networks: Mapping[str, nn.Module],
        method: Method,
        feed: Batches,
        *,
        steps: int,
        epochs: int,
        hold: Hold,
        checkpoints: Checkpoints,
        held: Batches | None = None,
        kept: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        self.run, self.group, self.networks = run, group, networks
        self._method, self._feed, self._held = method, feed, held
        self.steps, self._epochs, self._hold, self._checkpoints = steps, epochs, hold, checkpoints
        self.parameters = trained(networks)
        assert run.optimiser.lr is not None, "a plan resolves it"
        self._rate = run.optimiser.lr
        self._optimiser = optimise.adamw(self.parameters, run.optimiser, self._rate)
        self.average = None if run.ema is None else optimise.Average(self.parameters, run.ema)
        self.step, self.position, self.seen = 0, feed.start(), 0
        self._since, self._kept = Since(), kept

    def resume(self, say: Say) -> bool:
        """Continue from the newest whole checkpoint, if there is one. Raises StateError for one of another run."""
        about = self._checkpoints.load(self._tensors(), say)
        if about is None:
            return False
        self.step, self.seen = int(str(about["step"])), int(str(about["seen"]))
        self.position = Position(*about["position"])  # type: ignore[misc]
        self._feed.check(self.position)  # before it is needed
        return True

    def save(self) -> None:
        """Write a checkpoint of where the training is. Raises ModelError if a loss not measured yet is not finite."""
        if self._since.steps:
            self._measured()
        at = self.position
        about = {"step": self.step, "seen": self.seen, "position": [at.epoch, at.offset, at.digest]}
        self._checkpoints.save(self.step, self._tensors(), about)

    def train(self) -> Iterator[Metrics]:
        """Step by step, what was measured since it last was; nothing after steps in between.

        Raises ModelError, before the step that is measured changes anything, if a loss since then is not finite.
        """
        if self.step >= self.steps:
            return
        begun = perf_counter()
        for step in self._feed.steps(self.position, self._epochs):
            metrics = self._stepped(step)
            self.position, self.step, self.seen = step.after, self.step + 1, self.seen + step.rows
            self._since.seconds += perf_counter() - begun  # with waiting for data, without what is done between steps
            yield self._rates(metrics) if metrics else {}
            if self.step >= self.steps:
                return
            begun = perf_counter()

    def evaluate(self) -> Metrics:
        """The loss of the rows held out, of the weights and of the averaged ones. A collective."""
        metrics = {f"held_out/{name}": value for name, value in self._held_out().items()}
        if self.average is not None:
            with self.averaged():
                metrics["held_out/ema_loss"] = self._held_out()["loss"]
        return metrics

    def idle(self) -> list[torch.Tensor]:
        """What updates alone need: the optimiser's moments, and the averaged weights."""
        moments = [v for state in self._optimiser.state.values() for name, v in state.items() if name != "step"]
        return moments + ([] if self.average is None else list(self.average.tensors.values()))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The networks with their averaged weights, for a `with` block."""
        assert self.average is not None
        with self.average.standing_in():
            yield

    def _rates(self, metrics: Metrics) -> Metrics:
        since, self._since = self._since, Since()
        return {
            **metrics,
            **_means(since.metrics),
            "samples_per_second": since.rows / since.seconds,
            "tokens_per_second": metrics.pop("tokens") / since.seconds,
            "peak_bytes": peak_bytes(str(self.group.device))[0],
            "epoch": self.position.epoch,
        }

    def _stepped(self, step: Step) -> Metrics:
        since = self._since
        for part, batch in enumerate(step.parts):
            with self._bound(), self._seeded(part):
                losses = self._method.losses(self.networks, batch, Moment(self.run.seed, self.step, part))
                # gradients are averaged over the processes, and a step's loss is a mean over its rows
                loss = losses.rows[: batch.real].sum() * (self.group.ranks / step.rows)
                loss.backward()
            since.tally.add(losses, batch.real)
        if self.group.ranks > 1:
            average_gradients(self.parameters.values())
        since.metrics.append(step.metrics)
        since.norms.append(optimise.clip(self.parameters, self.run.optimiser.clip))
        since.rows, since.steps, since.last = since.rows + step.rows, since.steps + 1, self.step + 1
        rate = self._rate * optimise.factor(self.run.schedule, self.step, self.steps)
        done = self.step + 1
        metrics = self._measured() | {"lr": rate} if done % self.run.log_every == 0 or done == self.steps else {}
        self._update(rate)
        return metrics

    def _measured(self) -> Metrics:
        """Means over the steps since it last was measured, and the tokens read. Waits for the device; a collective."""
        metrics, tokens = self._since.tally.reduced(self.group)
        norm = float(torch.stack(self._since.norms).mean())
        if not (math.isfinite(metrics.get("loss", 0.0)) and math.isfinite(norm)):
            steps, last = self._since.steps, self._since.last
            where = f"at step {last}" if steps == 1 else f"in steps {last + 1 - steps} to {last}"
            remedy = "lower optimiser.lr, or look at the rows of this step"
            raise ModelError(f"the loss or its gradient is not finite {where}", remedy=remedy)
        return {**metrics, "grad_norm": norm, "tokens": tokens}

    def _update(self, rate: float) -> None:
        for settings in self._optimiser.param_groups:
            settings["lr"] = rate
        self._optimiser.step()
        self._optimiser.zero_grad()
        if self.average is not None:
            self.average.update()

    @torch.no_grad()
    def _held_out(self) -> Metrics:
        assert self._held is not None
        tally, draws = Tally(), self.run.evaluation.draws if self.run.evaluation else 1
        for network in self.networks.values():
            network.eval()
        for step in self._held.steps(self._held.start(), epochs=1):
            for batch in step.parts:
                for draw in range(draws):
                    tally.add(self._method.held_out(self.networks, batch, draw, draws), batch.real)
        for network in self.networks.values():
            network.train()
        return tally.reduced(self.group)[0]

    @contextmanager
    def _bound(self) -> Iterator[None]:
        with ExitStack() as stack:
            for network in self.networks.values():
                stack.enter_context(self._hold(network))
            yield

    @contextmanager
    def _seeded(self, part: int) -> Iterator[None]:
        """Dropout draws from torch's own generator: seeded for this part of this step, and left as it was found."""
        device = self.group.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(generator("dropout", self.run.seed, self.step, part, self.group.rank).initial_seed())
            yield

    def _tensors(self) -> dict[str, torch.Tensor]:
        """All that a checkpoint holds."""
        tensors = {f"method.{name}": tensor for name, tensor in self._kept.items()}
        for name, parameter in self.parameters.items():
            tensors[f"weights.{name}"] = parameter.detach()
            for key, value in self._optimiser.state[parameter].items():
                tensors[f"optimiser.{name}.{key}"] = value
            if self.average is not None:
                tensors[f"ema.{name}"] = self.average.tensors[name]
        return tensors


def _means(several: Sequence[Mapping[str, float]]) -> Metrics:
    """Of each name, over those that have it."""
    found: dict[str, list[float]] = {}
    for metrics in several:
        for name, value in metrics.items():
            found.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in found.items()}
