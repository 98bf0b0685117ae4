"""Batches of what is learnt from rollouts, for one process of a group: an epoch is sampled when its first is asked for.

    feed = RolloutFeed(rollouts, policy, plan, group)
    for step in feed.steps(feed.start(), epochs=10): ...

Samples are shuffled and shared out to the epoch's steps; their examples go in batches of the rollout's rows, the last
filled up, so that training computes at the row count that the engine sampled at. All processes have as many batches.
A step without an example, as all of an epoch whose groups have no spread, has no batch, and nothing moves.
Deliberately absent: rollouts on disk. A run is continued from the beginning of an epoch, with the samples it would have
had.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from time import perf_counter
from typing import Protocol

import torch

from ..data.order import Position
from ..distributed.group import Group
from ..errors import StateError
from .feed import Step
from .methods import Batch
from .methods.policy import Example, Policy
from .noise import generator
from .plan import Plan
from .rollouts import Drawn, Scored, chunks

Placed = tuple[int, Example]


class Epochs(Protocol):
    """Where samples come from."""

    def epoch(self, epoch: int) -> Drawn:
        """Those of an epoch. A collective."""


class RolloutFeed:
    """Steps made of an epoch's samples."""

    def __init__(self, rollouts: Epochs, policy: Policy, plan: Plan, group: Group) -> None:
        run = plan.run
        assert run.rollout is not None
        self._rollouts, self._policy, self._run, self._group = rollouts, policy, run, group
        self._prompts = [(prompt.text, sorted(prompt.facts.items())) for prompt in plan.prompts]
        self._rows, self._each = run.rollout.rows, run.rollout.samples // run.rows

    def start(self) -> Position:
        """Before the first epoch."""
        assert self._run.rollout is not None
        # whoever makes them, samples are the same; prompts are what they say, not where they lie
        same = replace(self._run.rollout, graphs="auto", engines=0, prompts="", held_out=None)
        name = (same, self._prompts, self._run.rows, self._run.seed)
        return Position(0, 0, sha256(repr(name).encode()).hexdigest())

    def check(self, position: Position) -> None:
        """Raise StateError for a position in other rollouts, or within an epoch."""
        if position.digest != self.start().digest or position.offset:
            remedy = "resume with the prompts, groups, batch size and seed it began with, or begin anew"
            raise StateError("the run to resume sampled otherwise", value=position.digest, remedy=remedy)

    def steps(self, position: Position, epochs: int) -> Iterator[Step]:
        """Every step left of so many epochs."""
        self.check(position)
        took: dict[str, float] = {}
        for epoch in range(position.epoch, epochs):
            if epoch:
                self._policy.renew(epoch * self._each)
            drawn = self._rollouts.epoch(epoch)
            begun, metrics = perf_counter(), {**drawn.metrics, **took}
            for index, samples in enumerate(self._shared(epoch, drawn.samples)):
                last = index + 1 == self._each
                after = Position(epoch + last, 0 if last else index + 1, position.digest)
                step = self._step(epoch, samples, drawn.spare)
                yield replace(step, after=after, metrics={} if index else metrics)
            took = {"seconds/update": perf_counter() - begun}  # of the epoch before, for it is not known sooner

    def _shared(self, epoch: int, samples: Sequence[Scored]) -> Iterator[Sequence[Scored]]:
        """Those of the epoch's samples that are here, in another order, a part for each of its steps.

        Which step a sample belongs to is the same for any number of processes.
        """
        assert self._run.rollout is not None
        here = {scored.number: scored for scored in samples}
        order = torch.randperm(self._run.rollout.samples, generator=generator("order", self._run.seed, epoch))
        for part in order.tensor_split(self._each):
            yield [here[number] for number in part.tolist() if number in here]

    def _step(self, epoch: int, samples: Sequence[Scored], spare: Scored) -> Step:
        """The batches of these samples, as many as in any other process; a spare one fills up."""
        groups = self._grouped(epoch, samples)
        batches = [self._batch(part) for group in groups for part in chunks(group, self._rows)]
        counts = torch.zeros(self._group.ranks + 1)
        counts[self._group.rank], counts[-1] = len(batches), sum(batch.real for batch in batches)
        *each, rows = self._group.total(counts).tolist()
        missing = int(max(each)) - len(batches)
        if missing:
            filler = replace(self._batch([self._grouped(epoch, [spare])[0][0]]), real=0)
            batches += [filler] * missing
        return Step(tuple(batches), int(rows), self.start())

    def _grouped(self, epoch: int, samples: Sequence[Scored]) -> list[list[Placed]]:
        """The samples' examples with their places, those that can share a batch together."""
        groups: dict[Hashable, list[Placed]] = {}
        for scored in samples:
            sample, source = scored.sample, generator("examples", self._run.seed, epoch, scored.number)
            weight = torch.tensor([scored.advantage], dtype=torch.float32, device=sample.latents.device)
            for index, example in enumerate(self._policy.examples(sample, source)):
                place, key = scored.number * len(sample.moves) + index, tuple(example.static.items())
                whole = replace(example, tensors={**example.tensors, "advantage": weight})
                groups.setdefault(key, []).append((place, whole))
        return list(groups.values())

    def _batch(self, examples: Sequence[Placed]) -> Batch:
        """Rows of these, filled up with copies of the first."""
        real = len(examples)
        filled = [*examples, *[examples[0]] * (self._rows - real)]
        names = filled[0][1].tensors
        tensors = {name: torch.cat([example.tensors[name] for _, example in filled]) for name in names}
        places = tuple(place for place, _ in filled)
        return Batch(tensors, (), places, real, filled[0][1].static)
