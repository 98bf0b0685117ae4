"""What a picture will be, shown while it is still noise: the clean latents that a step points to, decoded by the model.

    previews = Previews(2, card, tell)             # tell(index, latents), from the engine's thread
    job = Job(instance, request, listener=..., observers=[previews])
    decoding(instance, request, latents, listener)          # a job that is the decoder alone

A flow runs straight between two steps, so x at sigma 0 is x - sigma dx/dsigma: exact for the last step, and better the
later. The decode is a step of the engine like any other.
"""

from collections.abc import Callable

import torch

from ..card import Card, whole
from ..engine.instance import Instance
from ..engine.job import Job, Listener
from ..loop import Key, Result, Step, Unit
from ..loops.denoise import DenoiseState
from ..request import Request

Tell = Callable[[int, torch.Tensor], None]


class Previews:
    """Watches a job for the steps after which `count` previews are due, evenly spread. Changes nothing."""

    def __init__(self, count: int, card: Card, tell: Tell) -> None:
        self._count, self._told, self._tell = count, 0, tell
        self._first: int | None = None
        self._train_steps = whole(card.settings, "train_steps")

    def on_step(self, job: Job, step: Step, key: Key, result: Result) -> None:
        """Tell of the clean latents where a preview is due."""
        state = job.state
        if step.unit is not Unit.DENOISE or not isinstance(state, DenoiseState) or self._told == self._count:
            return
        self._first = state.index if self._first is None else self._first
        done, total = state.index + 1 - self._first, len(state.experts) - self._first
        if done * (self._count + 1) >= (self._told + 1) * total and done < total:
            now, then = (
                state.table[state.index, 0] / self._train_steps,
                state.table[state.index + 1, 0] / self._train_steps,
            )
            x, after = step.tensors["latents"], result.tensors["latents"]
            self._tell(self._told, x - now * (after - x) / (then - now))
            self._told += 1


def decoding(model: Instance, request: Request, latents: torch.Tensor, listener: Listener) -> Job:
    """A job of the stages after denoising, on these latents."""
    job = Job(model, request, listener=listener)
    job.stage = next(i for i, bound in enumerate(job.stages) if "latents" in bound.stage.reads)
    job.slots = {"latents": latents}
    return job
