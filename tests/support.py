"""Requests for the tiny checkpoints, loops that watch, and comparison of results bit for bit."""

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch

import tiny
from loopwright.engine.instance import Instance
from loopwright.engine.job import Job
from loopwright.engine.runner import Serial
from loopwright.request import Request

KINDS = ("t2v", "i2v", "ti2v", "ti2v_text", "a14b", "a14b_i2v", "v2v")
TASKS = {**tiny.TASKS, "ti2v_text": "text_to_video"}
_RANDOM = np.random.default_rng(0)
IMAGE = _RANDOM.integers(0, 256, (40, 50, 3), dtype=np.uint8)
VIDEO = _RANDOM.integers(0, 256, (9, 40, 50, 3), dtype=np.uint8)


def media_for(kind: str) -> dict[str, object]:
    """Parameters of a small request of that kind: its task, media and sizes; three to four denoising steps."""
    given: dict[str, object] = {"task": TASKS[kind], "height": 32, "width": 32, "num_inference_steps": 3, "seed": 3,
                                "negative_prompt": "bad", "max_sequence_length": 32}  # fmt: skip
    if TASKS[kind] == "image_to_video":
        given["image"] = IMAGE
    if kind == "v2v":
        return given | {"video": VIDEO, "strength": 0.8, "num_inference_steps": 4}
    return given | {"num_frames": 9}


def run(model: Instance, request: Request, **options: object) -> dict[str, torch.Tensor]:
    """The outputs of a request run alone. Raises what ended it."""
    return finished(Job(model, request, **options))


def finished(job: Job) -> dict[str, torch.Tensor]:
    """Run a job to its end and give its outputs."""
    runner = Serial()
    runner.submit(job)
    runner.run()
    if job.error is not None:
        raise job.error
    assert job.output is not None
    return dict(job.output)


def same(a: Mapping[str, torch.Tensor] | None, b: Mapping[str, torch.Tensor] | None) -> bool:
    """Whether two sets of outputs are equal bit for bit; a job without output equals nothing."""
    if a is None or b is None or set(a) != set(b):
        return False
    return all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """||a - b|| / ||b||."""
    return float((a.double() - b.double()).norm() / b.double().norm())


class Watched:
    """A loop that shows each state to `see(loop, state)` before its next step is asked for."""

    def __init__(self, loop: object, see: Callable[[object, object], None]) -> None:
        self._loop, self._see = loop, see

    def __getattr__(self, name: str) -> object:
        return getattr(self._loop, name)

    def next(self, state: object) -> object:
        self._see(self._loop, state)
        return self._loop.next(state)


def watched(model: Instance, see: Callable[[object, object], None]) -> Instance:
    """An instance of the same card and components whose loops are `Watched`."""
    return with_loops(model, {name: Watched(loop, see) for name, loop in model.loops.items()})


def with_loops(model: Instance, loops: Mapping[str, object]) -> Instance:
    """An instance of the same card and components with other loops."""
    return Instance(
        model.card, loops, model.store, device=model.binding.device, locate=model.locate, prepare=model.prepare
    )


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Every tensor of a state, of slots or of a result."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from tensors_in(getattr(value, name))
