"""An epoch's samples: requests of the engine over the networks in training, scored, their advantages known.

    rollouts = Rollouts(plan, group, live, policy, score, say=say)
    found = rollouts.epoch(3)
    found.samples               # this process's, in groups of one prompt, each with its advantage
    found.metrics               # rewards, groups without spread, samples not scored, seconds

All that is random is a function of the run's seed, the epoch, the group and the place in it. Samples go to be scored
as soon as their wave is done, while the next is sampled. Groups are shared out to processes whole. A sample that could
not be scored is dropped and counted, by reward and by reason; a group without spread is learnt nothing from.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from threading import Event
from time import perf_counter
from typing import TypeVar

import torch

from ..api import Model, Result
from ..api.trajectory import Move
from ..distributed.group import Group
from ..errors import StateError
from ..request import Request
from ..rewards import Composite
from ..rewards import Sample as Shown
from .advantages import Advantages, grouped
from .gap import EXACT, bound, gap, require
from .live import Live
from .methods.policy import Policy, Sample
from .noise import generator
from .plan import Plan, Say
from .prompts import Prompt, taken
from .sampler import Sampler

CALLS = 4  # that a wave of samples fills, before they are scored
REASONS = 5  # for missing scores that are told, the commonest
Metrics = dict[str, float]
Serving = Callable[[int], AbstractContextManager[Sampler]]  # what samples an epoch with the weights as they are
T = TypeVar("T")
Parts = Mapping[str, Sequence[float | None]]


@dataclass(frozen=True, slots=True)
class Scored:
    """A sample, its number in the epoch, and its advantage."""

    number: int
    sample: Sample
    advantage: float


@dataclass(frozen=True, slots=True)
class Drawn:
    """What an epoch has to learn from; `spare` is one more, to fill up with where there is nothing."""

    samples: Sequence[Scored]
    spare: Scored
    metrics: Metrics


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, the prompt it is of, and its number in the epoch."""

    number: int
    prompt: Prompt
    request: Request


@dataclass(frozen=True, slots=True)
class Sampled:
    """An epoch's samples in this process, their scores by reward, why some have none, and what was measured."""

    epoch: int
    asked: Sequence[Asked]
    made: Sequence[Sample]
    parts: Parts
    reasons: Counter[str]
    metrics: Metrics


class Stopped(Exception):
    """Samples that nobody wants any more are not made."""


class Rollouts:
    """The rollouts of a run in one process of its group. Which samples were not scored, and why, is said.

    Attributes:
        sampler: by which all is sampled; None is the card's own.

    `serving` gives what samples; by default the networks as they are, in this process.
    """

    def __init__(
        self,
        plan: Plan,
        group: Group,
        live: Live,
        policy: Policy,
        score: Composite,
        *,
        say: Say,
        serving: Serving | None = None,
    ) -> None:
        assert plan.run.rollout is not None and plan.asked is not None
        self._run, self._rollout, self._asked = plan.run, plan.run.rollout, plan.asked
        self._prompts = plan.prompts
        self._group, self._live, self._policy, self._score, self._say = group, live, policy, score, say
        self._serving = self._here if serving is None else serving
        self._stopped = Event()
        self.sampler = self._rollout.sampler or policy.sampler

    def epoch(self, epoch: int) -> Drawn:
        """Sample and score. A collective. Raises StateError, in all processes, where not one sample was scored."""
        return self.drawn(self.sample(epoch, lambda: self._now(epoch)))

    def sample(self, epoch: int, serving: Callable[[], AbstractContextManager[Sampler]]) -> Sampled:
        """This process's samples of an epoch, by that model, and what rewards say of them. From any thread.

        Raises Stopped, before the next wave, if it is told to stop.
        """
        begun, before = perf_counter(), self._score.failures
        asked = list(self._requests(epoch))
        with serving() as model:
            made, parts, waited = self._made(model, asked)
            apart = self._apart(model, made)
        seconds = {"seconds/rollout": perf_counter() - begun - waited, "seconds/score": waited}
        return Sampled(epoch, asked, made, parts, self._score.failures - before, seconds | apart)

    def drawn(self, sampled: Sampled) -> Drawn:
        """What is learnt from them. A collective. Raises StateError, in all, where not one was scored."""
        asked, made, parts = sampled.asked, sampled.made, sampled.parts
        totals = self._score.total(parts)
        scores = torch.tensor([torch.nan if score is None else score for score in totals], dtype=torch.float64)
        found = grouped(scores.view(-1, self._rollout.group_size))
        kept = [
            Scored(each.number, made[place], float(found.values.flatten()[place]))
            for place, each in enumerate(asked)
            if not (found.flat[place // self._rollout.group_size] or scores[place].isnan())
        ]
        measured = self._measured(scores, found, parts)
        self._tell(sampled.epoch, measured, sampled.reasons)
        return Drawn(kept, Scored(asked[0].number, made[0], 0.0), {**measured, **sampled.metrics})

    def stop(self) -> None:
        """No samples are wanted any more."""
        self._stopped.set()

    @contextmanager
    def _now(self, epoch: int) -> Iterator[Sampler]:
        """The weights that sample as they are now, served."""
        with self._policy.sampling(), self._serving(epoch) as model:
            yield model

    def _here(self, epoch: int) -> AbstractContextManager[Sampler]:
        return self._live.serving(f"epoch {epoch}", sampler=self.sampler)

    def _requests(self, epoch: int) -> Iterator[Asked]:
        """This process's, group after group."""
        rollout, seed = self._rollout, self._run.seed
        numbers = taken(len(self._prompts), rollout.groups, epoch, seed)
        template = self._windowed(epoch)
        for index in range(self._group.rank, rollout.groups, self._group.ranks):
            prompt = self._prompts[numbers[index]]
            for place in range(rollout.group_size):
                number = index * rollout.group_size + place
                request = replace(template, prompt=prompt.text, seed=seed_of("rollout", seed, epoch, number))
                yield Asked(number, prompt, request)

    def _windowed(self, epoch: int) -> Request:
        """What is asked, drawing noise where this epoch's samples do."""
        width, last = self._rollout.window, self._asked.num_inference_steps - 1
        if width is None or self._asked.noise_steps is None:
            return self._asked
        source = generator("window", self._run.seed, epoch)
        start = int(torch.randint(last - width + 1, (), generator=source))
        return replace(self._asked, noise_start=start, noise_steps=width)

    def _made(self, model: Sampler, asked: Sequence[Asked]) -> tuple[list[Sample], Parts, float]:
        """The samples in their order, their scores by reward, and the seconds that scoring was waited for."""
        made, scored = list[Sample](), list[Future[Parts]]()
        with ThreadPoolExecutor(1) as scorer:
            for wave in chunks(asked, CALLS * self._rollout.rows * max(1, self._rollout.engines)):
                if self._stopped.is_set():
                    raise Stopped
                ordered = results(model, wave, recorded=True)
                seen = [shown(result, each.prompt) for result, each in zip(ordered, wave, strict=True)]
                scored.append(scorer.submit(self._score.parts, seen))
                made += map(self._kept, ordered)
            begun = perf_counter()
            parts = joined([each.result() for each in scored])
        return made, parts, perf_counter() - begun

    def _apart(self, model: Sampler, made: Sequence[Sample]) -> Metrics:
        """How far log-probs lie from training's. Raises BackendError if that is too far."""
        asked = (self._asked.attention, self._asked.kernels)
        if not isinstance(model, Model):  # engines are exact
            return {}
        plain = model.graphs is None and bound(self._run, asked) == EXACT
        if plain or not self._policy.noisy:
            return {}
        found = gap(model, made, self._run, rows=self._rollout.rows)
        require(found, bound(self._run, asked))
        return {"logp_gap": found}

    def _kept(self, result: Result) -> Sample:
        """What may be learnt from: latents of steps that drew noise alone, and none where noise teaches nothing."""
        asked, moves = result.request, [] if result.trajectory is None else result.trajectory.moves
        start, steps = (asked.noise_start or 0, asked.noise_steps or 0) if self._policy.noisy else (0, 0)
        drew = range(start, start + steps)
        kept = [move if index in drew else _light(move) for index, move in enumerate(moves)]
        return Sample(asked, kept, result.latents)

    def _measured(self, scores: torch.Tensor, found: Advantages, parts: Parts) -> Metrics:
        """Over all processes; of what nothing is known, nothing."""
        rows = [_sums([None if math.isnan(score) else score for score in scores.tolist()])]
        rows += [_sums(values) for values in parts.values()]
        dull, lost = found.flat & ~found.lost, found.lost
        rows.append([float(dull.sum()), float(lost.sum()), float(len(lost))])
        (count, first, second), *each, (same, gone, groups) = self._group.total(
            torch.tensor(rows, dtype=torch.float64)
        ).tolist()
        asked = self._rollout.samples
        measured = {"not_scored": asked - count, "groups_lost": gone}
        if count:
            mean = first / count
            measured |= {"reward_mean": mean, "reward_std": max(second / count - mean**2, 0.0) ** 0.5}
        if groups > gone:
            measured["zero_std_ratio"] = same / (groups - gone)
        if len(parts) > 1:
            for name, (known, total, _) in zip(parts, each, strict=True):
                measured[f"not_scored/{name}"] = asked - known
                measured |= {f"reward/{name}": total / known} if known else {}
        return measured

    def _tell(self, epoch: int, measured: Metrics, reasons: Counter[str]) -> None:
        """Say which samples were not scored, and why, as far as rewards say it in this process."""
        missing, asked = int(measured["not_scored"]), self._rollout.samples
        if not missing:
            return
        why = told(reasons)
        self._say(f"epoch {epoch}: {missing} of {asked} samples were not scored{why}")
        if missing == asked:
            remedy = f"see to the rewards{why}; the same command then goes on from the last checkpoint"
            raise StateError(f"not one sample of epoch {epoch} was scored", remedy=remedy)


def results(model: Sampler, asked: Sequence[Asked], *, recorded: bool) -> list[Result]:
    """What comes of these requests, in their order."""
    requests = [each.request for each in asked]
    made = {result.request: result for result in model.run_all(requests, recorded=recorded)}
    return [made[request] for request in requests]


def joined(parts: Sequence[Parts]) -> Parts:
    """The scores of several waves as those of one."""
    return {name: [score for part in parts for score in part[name]] for name in parts[0]}


def told(reasons: Counter[str]) -> str:
    """The commonest of the reasons for missing scores."""
    return "".join(f"; {reason} ({count})" for reason, count in reasons.most_common(REASONS))


def _sums(scores: Sequence[float | None]) -> list[float]:
    """How many there are, their sum and that of their squares."""
    known = [score for score in scores if score is not None]
    return [float(len(known)), sum(known), sum(score * score for score in known)]


def chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Parts of so many, the last of what is left."""
    for first in range(0, len(items), size):
        yield items[first : first + size]


def seed_of(*scope: object) -> int:
    """A request's seed, a function of what it is for."""
    return generator(*scope).initial_seed()


def shown(result: Result, prompt: Prompt) -> Shown:
    """What is scored of a result."""
    assert result.video is not None, "what is scored is decoded"
    return Shown(prompt.text, torch.from_numpy(result.video), prompt.facts)


def _light(move: Move) -> Move:
    """A step of which nothing is learnt: what level it was at, without latents."""
    row = move.rows["row"]
    return replace(move, rows={"row": row}, after=row.new_empty(0))
