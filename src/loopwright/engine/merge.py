"""Steps of several requests in one call: rows concatenated, the op called once, each request given its own row.

    merger = Merger()
    merger.run([job_a, job_b])          # both have a pending step with the same key

In `fixed` mode a call always has the requests' number of rows, empty places filled with copies of the first, so that a
row's bits depend on nobody; that this holds is proved for a key before it is used. Constant conditioning is put
together once for a group of requests and stays; only what a step changes is copied. The plain twin is `Job.step`.

Deliberately absent: choosing who shares a call (`runner`), and prices.
"""

import time
from collections.abc import Mapping, Sequence

import torch

from ..errors import BackendError
from ..loop import Key, Tensors, Unit
from .instance import Instance
from .job import Job, Pending

MERGED = (Unit.DENOISE,)
_TRIALS = 3


class Merger:
    """Keeps the conditioning of groups that share calls, and which keys have been proved. One per runner."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, ...], dict[str, torch.Tensor]] = {}
        self._proved: set[tuple[Key, int]] = set()
        self.calls = 0
        self.rows = 0

    def run(self, jobs: Sequence[Job], pendings: Sequence[Pending]) -> None:
        """Run the pending steps, all of one key, in one call. An error of the call ends these jobs and no others."""
        begun = time.perf_counter()
        rows = jobs[0].request.rows if jobs[0].request.mode == "fixed" else len(jobs)
        places = [*range(len(jobs)), *[0] * (rows - len(jobs))]
        try:
            self._prove(jobs[0].model, pendings[0], rows, jobs[0].request.mode)
            results = _split(self._call(jobs, pendings, places), len(jobs))
        except Exception as error:
            for job in jobs:
                job.fail(error)
            return
        self.calls, self.rows = self.calls + 1, self.rows + len(jobs)
        seconds = time.perf_counter() - begun
        for job, pending, tensors in zip(jobs, pendings, results, strict=True):
            job.complete(pending, tensors, seconds)

    def forget(self, job: Job) -> None:
        """Give back what was kept for groups with this job."""
        self._groups = {ids: kept for ids, kept in self._groups.items() if job.id not in ids}

    def _call(self, jobs: Sequence[Job], pendings: Sequence[Pending], places: Sequence[int]) -> Tensors:
        step = pendings[0].step
        tensors = {name: torch.cat([pendings[place].step.tensors[name] for place in places]) for name in step.tensors}
        lent = self._lent(jobs, pendings, places)
        with torch.no_grad():
            return step.op(jobs[0].model.parts(step.uses), **tensors, **lent, **step.static)

    def _lent(
        self, jobs: Sequence[Job], pendings: Sequence[Pending], places: Sequence[int]
    ) -> dict[str, tuple[torch.Tensor]]:
        """The handles as rows, put together once for these requests in these places."""
        kept = self._groups.setdefault(tuple(jobs[place].id for place in places), {})
        for name in pendings[0].lent:
            if name not in kept:
                kept[name] = torch.cat([pendings[place].lent[name] for place in places])
        return {name: (kept[name],) for name in pendings[0].lent}

    def _prove(self, model: Instance, pending: Pending, rows: int, mode: str) -> None:
        if mode == "fixed" and rows > 1 and (pending.key, rows) not in self._proved:
            prove(model, pending, rows)
            self._proved.add((pending.key, rows))


def prove(model: Instance, pending: Pending, rows: int) -> None:
    """Raise BackendError unless a row's bits are the same in every place and among random partners."""
    step = pending.step
    generator = torch.Generator("cpu").manual_seed(0)
    parts = model.parts(step.uses)
    first: Tensors | None = None
    for trial in range(_TRIALS):
        place = trial * (rows - 1) // (_TRIALS - 1)
        tensors = {name: _among(tensor, rows, place, generator) for name, tensor in step.tensors.items()}
        lent = {name: (_among(tensor, rows, place, generator),) for name, tensor in pending.lent.items()}
        with torch.no_grad():
            out = {name: item[place] for name, item in step.op(parts, **tensors, **lent, **step.static).items()}
        if first is None:
            first = out
        elif not all(torch.equal(out[name], first[name]) for name in out):
            raise BackendError(
                f"a row's bits depend on its neighbours on {step.binding.device} at this many rows",
                value=rows,
                remedy='use mode="exact" or "throughput", or another number of rows',
            )


def _among(tensor: torch.Tensor, rows: int, place: int, generator: torch.Generator) -> torch.Tensor:
    """The row in its place among strangers: its values in another order and, if they are not counts, other sizes."""
    strangers = []
    for _ in range(rows - 1):
        other = tensor.flatten()[torch.randperm(tensor.numel(), generator=generator).to(tensor.device)].view_as(tensor)
        size = 0.5 + torch.rand((), generator=generator, dtype=torch.float32).item()
        strangers.append(other * size if other.is_floating_point() else other)
    return torch.cat([*strangers[:place], tensor, *strangers[place:]])


def _split(tensors: Tensors, count: int) -> list[dict[str, torch.Tensor]]:
    """Each request's row, as its own copy: nothing keeps the call's buffers."""
    parts: Mapping[str, Sequence[torch.Tensor]] = {name: tensor.split(1) for name, tensor in tensors.items()}
    return [{name: part[i].clone() for name, part in parts.items()} for i in range(count)]
