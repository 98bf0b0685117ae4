"""Prompts held out, sampled now and then: what rewards say that are trained on, and judges that are not, of the same.

    held = HeldOut(plan, group, live, {"reward": score, "judge": judges}, sampler="flow_sde", say=print)
    held.measure(500)       # {"held_out/reward": 0.8, "held_out/judge": 0.4, "held_out/diversity_ratio": 0.9, ...}

Each time the same requests, without noise in the steps. A reward that rises while the judges do not, or the samples of
a prompt become one, has found what the scorer falls for. All processes make all of the samples, since each may hold a
part of the weights; the first has them scored, and leaves a sheet of them among the previews.
"""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch

from .. import media
from ..api import Model
from ..distributed.group import Group
from ..rewards import Composite, Sample
from .live import Live
from .plan import Plan, Say
from .previews import FOLDER
from .rollouts import CALLS, Asked, Metrics, Parts, chunks, joined, results, seed_of, shown, told
from .sinks import METRICS, table

ROWS = COLUMNS = 4  # of a sheet: prompts, and samples of each
DIVERSITY = "held_out/diversity"


class HeldOut:
    """The prompts of a run that are held out, with who scores them, by what the weighted sum is called."""

    def __init__(
        self, plan: Plan, group: Group, live: Live, scores: Mapping[str, Composite], *, sampler: str | None, say: Say
    ) -> None:
        assert plan.run.evaluation is not None and plan.run.rollout is not None and plan.quiet is not None
        self._plan, self._group, self._live, self._sampler, self._say = plan, group, live, sampler, say
        self._scores, self._draws = scores, plan.run.evaluation.draws
        self._size = CALLS * plan.run.rollout.rows
        self._asked = [
            Asked(0, prompt, replace(plan.quiet, prompt=prompt.text, seed=seed_of("judge", place, draw)))
            for place, prompt in enumerate(plan.judged)
            for draw in range(self._draws)
        ]

    def measure(self, step: int, which: str = "") -> Metrics:
        """Means over all samples, in the first process; of what could not be scored, nothing. A collective.

        `which` says in metrics and of the sheet which weights the networks have, if not those in training.
        """
        before = {kind: score.failures for kind, score in self._scores.items()}
        with self._live.serving(f"{which}judged after step {step}", sampler=self._sampler) as model:
            samples, parts = self._made(model)
        if not self._group.first:
            return {}
        self._write(step, samples, which)
        measured = self._means(parts) | self._apart(samples)
        for kind, score in self._scores.items():
            if missing := int(measured[f"held_out/not_scored/{kind}"]):
                why = told(score.failures - before[kind])
                self._say(f"after step {step}: {missing} held-out samples have no {kind}{why}")
        return {name.replace("/", f"/{which}", 1): value for name, value in measured.items()}

    def _made(self, model: Model) -> tuple[list[Sample], dict[str, Parts]]:
        """The samples, and what rewards and judges say of each."""
        samples, said = list[Sample](), dict[str, list[Future[Parts]]]()
        with ThreadPoolExecutor(1) as scorer:
            for wave in chunks(self._asked, self._size):
                made = results(model, wave, recorded=False)
                if self._group.first:
                    seen = [shown(result, each.prompt) for result, each in zip(made, wave, strict=True)]
                    samples += seen
                    for kind, score in self._scores.items():
                        said.setdefault(kind, []).append(scorer.submit(score.parts, seen))
        return samples, {kind: joined([each.result() for each in futures]) for kind, futures in said.items()}

    def _means(self, parts: Mapping[str, Parts]) -> Metrics:
        found: Metrics = {}
        for kind, score in self._scores.items():
            totals = {kind: score.total(parts[kind]), **parts[kind]}
            known = {name: [value for value in values if value is not None] for name, values in totals.items()}
            found |= {f"held_out/{name}": sum(values) / len(values) for name, values in known.items() if values}
            found[f"held_out/not_scored/{kind}"] = float(len(totals[kind]) - len(known[kind]))
        return found

    def _apart(self, samples: Sequence[Sample]) -> Metrics:
        """How far samples of one prompt lie apart, and as a ratio to when it was first measured."""
        if self._draws < 2:
            return {}
        now = sum(map(diversity, chunks(samples, self._draws))) / len(self._plan.judged)
        before = [row[DIVERSITY] for row in table(self._plan.output / METRICS) if DIVERSITY in row]
        first = before[0] if before else now
        return {DIVERSITY: now} | ({f"{DIVERSITY}_ratio": now / first} if first else {})

    def _write(self, step: int, samples: Sequence[Sample], which: str) -> None:
        """A sheet: a row a prompt, of each sample the frame in the middle."""
        groups = [group[:COLUMNS] for group in chunks(samples, self._draws)][:ROWS]
        frames = [sample.frames[len(sample.frames) // 2].numpy() for group in groups for sample in group]
        sheet = media.contact_sheet(np.stack(frames), columns=len(groups[0]))
        about = {"step": step, "prompts": [group[0].prompt for group in groups]}
        name = f"held-out-{which.replace('_', '-')}{step:08}.png"
        media.write(self._plan.output / FOLDER / name, sheet[None], fps=1, metadata=about)


def diversity(samples: Sequence[Sample]) -> float:
    """The mean over pairs of the root mean square difference of their pixels, of 0 to 1."""
    pixels = torch.stack([sample.frames.flatten() for sample in samples]).float() / 255
    return float(torch.pdist(pixels).mean() / math.sqrt(pixels.shape[1]))
