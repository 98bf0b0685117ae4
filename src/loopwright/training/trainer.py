"""The trainer: steps, checkpoints, evaluation. It knows networks by their roles, and no method.

    trainer = Trainer(run, group, networks, method, feed, steps=1000, epochs=10, hold=hold, checkpoints=checkpoints)
    trainer.resume(say)
    for metrics in trainer.train():         # after each step
        ...

A step's loss is the mean over its rows, over all processes and accumulated parts; what is reported is what was
differentiated. Deliberately absent: where batches come from, what a loss is, who is told.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from time import perf_counter

import torch
from torch import nn

from ..backends.usage import peak_bytes
from ..data.order import Position
from ..distributed.group import Group
from ..distributed.shard import trained
from ..errors import ModelError
from . import optimise
from .checkpoint import Checkpoints, Say
from .feed import Feed, Step
from .methods import Method, Moment
from .noise import generator
from .run import Run
from .tally import Tally

Hold = Callable[[nn.Module], AbstractContextManager[None]]
Metrics = dict[str, float]


class Trainer:
    """Optimises networks. `hold` keeps a network's choice of kernels over forward and backward pass.

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
        feed: Feed,
        *,
        steps: int,
        epochs: int,
        hold: Hold,
        checkpoints: Checkpoints,
        held: Feed | None = None,
    ) -> None:
        self.run, self.group, self.networks = run, group, networks
        self._method, self._feed, self._held = method, feed, held
        self.steps, self._epochs, self._hold, self._checkpoints = steps, epochs, hold, checkpoints
        self.parameters = trained(networks)
        assert run.optimiser.lr is not None, "a plan resolves it"
        self._rate = run.optimiser.lr
        self._optimiser = optimise.adamw(self.parameters, run.optimiser, self._rate)
        self.average = None if run.ema is None else optimise.Average(self.parameters, run.ema)
        self.step, self.position, self.seen = 0, feed.order.start(), 0

    def resume(self, say: Say) -> bool:
        """Continue from the newest whole checkpoint, if there is one. Raises StateError for one of another run."""
        about = self._checkpoints.load(self._tensors(), say)
        if about is None:
            return False
        self.step, self.seen = int(str(about["step"])), int(str(about["seen"]))
        self.position = Position(*about["position"])  # type: ignore[misc]
        self._feed.order.walk(self.position, epochs=0)  # tells of another order, before it is needed
        return True

    def save(self) -> None:
        """Write a checkpoint of where the training is."""
        at = self.position
        about = {"step": self.step, "seen": self.seen, "position": [at.epoch, at.offset, at.digest]}
        self._checkpoints.save(self.step, self._tensors(), about)

    def train(self) -> Iterator[Metrics]:
        """Step by step, what was measured. Raises ModelError, before anything is changed, if a loss is not finite."""
        if self.step >= self.steps:
            return
        begun = perf_counter()
        for step in self._feed.steps(self.position, self._epochs):
            metrics = self._stepped(step)
            self.position, self.step, self.seen = step.after, self.step + 1, self.seen + step.rows
            seconds = perf_counter() - begun  # with waiting for the data, without what is done between steps
            tokens = metrics.pop("tokens")
            yield {
                **metrics,
                "samples_per_second": step.rows / seconds,
                "tokens_per_second": tokens / seconds,
                "peak_bytes": peak_bytes(str(self.group.device))[0],
                "epoch": self.position.epoch,
            }
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

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The networks with their averaged weights, for a `with` block."""
        assert self.average is not None
        self.average.swap()
        try:
            yield
        finally:
            self.average.swap()

    def _stepped(self, step: Step) -> Metrics:
        tally = Tally()
        for part, batch in enumerate(step.parts):
            with self._bound(), self._seeded(part):
                losses = self._method.losses(self.networks, batch, Moment(self.run.seed, self.step, part))
                # gradients are averaged over the processes, and a step's loss is a mean over its rows
                loss = losses.rows[: batch.real].sum() * (self.group.ranks / step.rows)
                loss.backward()
            tally.add(losses, batch.real)
        norm = float(optimise.clip(self.parameters, self.run.optimiser.clip))
        metrics, tokens = tally.reduced(self.group)
        if not (math.isfinite(metrics["loss"]) and math.isfinite(norm)):
            remedy = "lower optimiser.lr, or look at the rows of this step"
            raise ModelError(f"the loss or its gradient is not finite at step {self.step + 1}", remedy=remedy)
        rate = self._rate * optimise.factor(self.run.schedule, self.step, self.steps)
        self._update(rate)
        return {**metrics, "grad_norm": norm, "lr": rate, "tokens": tokens}

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
        for step in self._held.steps(self._held.order.start(), epochs=1):
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
        tensors: dict[str, torch.Tensor] = {}
        for name, parameter in self.parameters.items():
            tensors[f"weights.{name}"] = parameter.detach()
            for key, value in self._optimiser.state[parameter].items():
                tensors[f"optimiser.{name}.{key}"] = value
            if self.average is not None:
                tensors[f"ema.{name}"] = self.average.tensors[name]
        return tensors
