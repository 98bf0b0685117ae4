"""A reward that is a model: its card loaded, its steps batched and placed by the engine as any other's.

    score = Served("openai/clip-vit-large-patch14", device="cuda", rows=16)
    score = Served(loopwright.load("clip", store=model.instance.store))     # beside a model, in the same memory

A sample is a request of the card's task "score". With one row a call the numbers are those of the network called by
itself, bit for bit; with more they are those of a call of so many rows, whoever is in it.
"""

import sys
from collections import Counter
from collections.abc import Sequence

from ..api import Model, load
from ..engine.job import Job
from ..errors import CapacityError, ModelError, RequestError
from ..program import resolve
from ..request import Frames, Request
from .reward import Sample

TASK, OUTPUT = "score", "score"


class Served:
    """A reward. `model` is loaded, or named as `loopwright.load` takes it. Raises RequestError if it is no scorer."""

    def __init__(self, model: str | Model, device: str = "auto", rows: int = 1) -> None:
        if rows < 1:
            raise RequestError("a call has at least one row", value=rows, remedy="give 1 or more")
        self.model = load(model, device=device) if isinstance(model, str) else model
        self.failures: Counter[str] = Counter()
        self._rows, card = rows, self.model.card
        if TASK not in card.programs:
            raise RequestError(f"{card.name} is no scorer: it has no task", value=TASK, choices=card.programs)

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        """A score a sample, None for one whose request fails by its own or for lack of memory. Raises anything else."""
        scheduler = self.model.scheduler()
        jobs = [scheduler.submit(Job(self.model.instance, self._request(sample))) for sample in samples]
        scheduler.run()
        return [self._score(job) for job in jobs]

    def sleep(self) -> None:
        """Take the model off its device until it is asked again."""
        instance = self.model.instance
        if self.model.graphs is not None:
            self.model.graphs.rest()
        instance.store.release(instance.binding.device, sys.maxsize)

    def _request(self, sample: Sample) -> Request:
        count, height, width, _ = sample.frames.shape
        video = Frames(sample.frames.contiguous().numpy().tobytes(), (count, height, width, 3))
        sharing = {"mode": "fixed", "rows": self._rows} if self._rows > 1 else {"mode": "exact"}
        return resolve(
            self.model.card,
            task=TASK,
            video=video,
            prompt=sample.prompt,
            height=height,
            width=width,
            seed=0,
            output=OUTPUT,
            **sharing,
        )

    def _score(self, job: Job) -> float | None:
        if isinstance(job.error, (ModelError, CapacityError)):
            self.failures[str(job.error)] += 1
            return None
        if job.error is not None:
            raise job.error
        assert job.output is not None, "ended without an error"
        slot = self.model.card.programs[TASK].outputs[OUTPUT]
        return float(job.output[slot].item())
