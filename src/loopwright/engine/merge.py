"""Steps of several requests in one call: rows concatenated, the op called once, each request given its own row.

    merger = Merger()
    results, flags = merger.run([job_a, job_b], [pending_a, pending_b])     # their steps have the same key

In `fixed` mode a call always has the requests' number of rows, empty places filled with copies of the first, so that a
row's bits depend on nobody; that this holds is proved for a key before it is used. Constant conditioning is put
together once for a group of requests and stays; only what a step changes is copied. Pools are shared as they lie: a row
finds its own pages in them. The plain twin is `Job.step`.

Deliberately absent: choosing who shares a call, and what follows from an error (`scheduler`).
"""

from collections.abc import Mapping, Sequence

import torch

from ..caches.pool import Storage
from ..errors import BackendError
from ..loop import Result, Step, Tensors, Unit, versionless
from .execute import Call, Executor, Handles, eager
from .flags import Flags
from .instance import Instance
from .job import Job, host_values

MERGED = (Unit.DENOISE, Unit.TOKEN, Unit.CHUNK, Unit.REWARD)
FREELY = (*MERGED, Unit.DECODE)  # in throughput mode; in fixed mode all would pay for rows that few need
_TRIALS = 3


class Merger:
    """Keeps the conditioning of groups that share calls. One per runner."""

    def __init__(self, execute: Executor = eager) -> None:
        self._execute = execute
        self._groups: dict[tuple[str, ...], dict[str, torch.Tensor]] = {}
        self.calls = 0
        self.rows = 0

    def run(self, jobs: Sequence[Job], calls: Sequence[Call]) -> tuple[list[Result], Flags]:
        """Run the jobs' pending calls, all of one key, as one: each job's own result, and whether they are finite.

        Raises what the op raises.
        """
        rows = rows_of(jobs)
        places = [*range(len(jobs)), *[0] * (rows - len(jobs))]
        self._prove(jobs[0].model, calls[0], rows, jobs[0].request.mode)
        tensors = self._execute(jobs[0].model, self._joined(jobs, calls, places))
        self.calls, self.rows = self.calls + 1, self.rows + len(jobs)
        flags = Flags(calls[0].step, tensors)
        return _split(calls[0].step, tensors, len(jobs)), flags

    def forget(self, job: Job) -> None:
        """Give back what was kept for groups with this job."""
        self._groups = {ids: kept for ids, kept in self._groups.items() if job.id not in ids}

    def _joined(self, jobs: Sequence[Job], calls: Sequence[Call], places: Sequence[int]) -> Call:
        first = calls[0]
        tensors = {name: torch.cat([calls[place].tensors[name] for place in places]) for name in first.tensors}
        return Call(first.step, first.key, tensors, self._lent(jobs, calls, places), len(places), first.storage)

    def _lent(self, jobs: Sequence[Job], calls: Sequence[Call], places: Sequence[int]) -> Handles:
        """The handles as rows, put together once for these requests in these places."""
        kept = self._groups.setdefault(tuple(jobs[place].id for place in places), {})
        for name in calls[0].handles:
            if name not in kept:
                kept[name] = torch.cat([calls[place].handles[name][0] for place in places])
        return {name: (kept[name],) for name in calls[0].handles}

    def _prove(self, model: Instance, call: Call, rows: int, mode: str) -> None:
        name = (versionless(call.key), rows)  # by which kernels a row is computed, no weight decides
        if mode == "fixed" and rows > 1 and name not in model.proved:
            prove(model, call, rows)
            model.proved.add(name)


def prove(model: Instance, call: Call, rows: int) -> None:
    """Raise BackendError unless a row's bits are the same in every place and among random partners."""
    generator = torch.Generator("cpu").manual_seed(0)
    first: Tensors | None = None
    for trial in range(_TRIALS):
        place = trial * (rows - 1) // (_TRIALS - 1)
        tensors = {name: _among(tensor, rows, place, generator) for name, tensor in call.tensors.items()}
        handles = {name: (_among(lent[0], rows, place, generator),) for name, lent in call.handles.items()}
        storage = {}
        for name in call.storage:
            storage[name], finders = _paged_among(call, name, rows, place, generator)
            tensors |= finders
        made = eager(model, Call(call.step, call.key, tensors, handles, rows, storage))
        out = {name: item[place] for name, item in made.items()} | _pages_of(storage, rows, place)
        if first is None:
            first = out
        elif not all(torch.equal(out[name], first[name]) for name in out):
            raise BackendError(
                f"a row's bits depend on its neighbours on {call.step.binding.device} at this many rows",
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


def _paged_among(
    call: Call, name: str, rows: int, place: int, generator: torch.Generator
) -> tuple[Storage, dict[str, torch.Tensor]]:
    """Pages of the row's own contents among those of strangers, in storage where nothing else lies, and their rows."""
    numbers, length = call.tensors[f"{name}_pages"], call.tensors[f"{name}_length"]
    storage = {
        part: _among(tensor[numbers[0]][None], rows, place, generator).flatten(0, 1)
        for part, tensor in call.storage[name].items()
    }
    lengths = torch.randint(0, int(length) + 1, (rows,), generator=generator).to(length)
    lengths[place] = length[0]
    pages = torch.arange(rows * numbers.shape[1], device=numbers.device).to(numbers).view(rows, -1)
    return storage, {f"{name}_pages": pages, f"{name}_length": lengths}


def _pages_of(storage: Mapping[str, Storage], rows: int, place: int) -> dict[str, torch.Tensor]:
    """The bytes of the pages in that place: what a row writes counts as much as what it returns."""
    return {
        f"{name}/{part}": tensor.chunk(rows)[place].contiguous().view(torch.uint8)
        for name, pool in storage.items()
        for part, tensor in pool.items()
    }


def shares(unit: Unit, mode: str) -> bool:
    """Whether a step of that unit may be in a call with other requests'."""
    return mode != "exact" and unit in (FREELY if mode == "throughput" else MERGED)


def rows_of(jobs: Sequence[Job]) -> int:
    """The rows of a call for these jobs, padding included."""
    request = jobs[0].request
    return request.rows if request.mode == "fixed" else len(jobs)


def _split(step: Step, tensors: Tensors, count: int) -> list[Result]:
    """Each request's row, as its own copy: nothing keeps the call's buffers."""
    parts: Mapping[str, Sequence[torch.Tensor]] = {name: tensor.split(1) for name, tensor in tensors.items()}
    rows = [{name: part[i].clone() for name, part in parts.items()} for i in range(count)]
    host = host_values(step, tensors)
    return [Result(row, {name: [values[i]] for name, values in host.items()}) for i, row in enumerate(rows)]
