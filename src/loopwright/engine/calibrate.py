"""How many rows the calls of a shape should have in fixed mode: measured once, proved, and kept.

    rows = choose_rows(instance, request, prices, limit=32)

A call is timed at one row, two, four, for as long as doubling makes a row cheaper. The answer is kept with the prices
of the device, so that it stays the same from one start to the next: answers must never depend on load.
"""

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from ..errors import ModelError
from ..loop import Tensors
from ..request import Request
from .execute import Call, Executor, eager
from .flags import Flags
from .instance import Instance
from .job import Job
from .merge import MERGED, prove
from .prices import SETTLED, Prices, label


def choose_rows(instance: Instance, request: Request, prices: Prices, limit: int, execute: Executor = eager) -> int:
    """The rows for requests of this shape, at most `limit`. Raises BackendError if their bits depend on neighbours."""
    job = Job(instance, replace(request, mode="fixed"))
    try:
        call = _first(job)
        name = label(call.key)
        kept = prices.chosen(name)
        if kept is None:
            kept = _measured(call, name, prices, limit, lambda joined: execute(instance, joined))
            prices.choose(name, kept)
            prices.save()
        rows = min(kept, limit)
        if rows > 1:
            prove(instance, call, rows)
        return rows
    finally:  # not before: the calls write to pages that the job leases
        job.cancel()
        job.step()


def _first(job: Job) -> Call:
    """The job's first call that may be shared."""
    while (call := job.pending()) is not None:
        if call.step.unit in MERGED:
            return call
        job.run(call)
    raise job.error or ModelError("a request has no step that may be shared", value=job.request.task)


def _measured(call: Call, name: str, prices: Prices, limit: int, run: Callable[[Call], Tensors]) -> int:
    """Time calls of one row, two, four ... until a row gets no cheaper; where that was."""
    rows = 1
    while True:
        joined = _repeated(call, rows)
        for _ in range(SETTLED + 1):
            begun = time.perf_counter()
            Flags(call.step, run(joined)).wait()
            prices.learn(name, rows, time.perf_counter() - begun)
        best = prices.rows(name, limit, limit)
        if best <= rows or rows * 2 > limit:
            return min(best, rows)
        rows *= 2


def _repeated(call: Call, rows: int) -> Call:
    """The call with its row so many times."""
    tensors = {name: torch.cat([tensor] * rows) for name, tensor in call.tensors.items()}
    handles = {name: (torch.cat([lent[0]] * rows),) for name, lent in call.handles.items()}
    return Call(call.step, call.key, tensors, handles, rows, call.storage)
