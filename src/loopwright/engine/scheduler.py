"""Many requests at once: who runs next, with whom, and when a new one may begin.

    scheduler = Scheduler(policy=POLICIES["shortest"], prices=Prices(path))
    job = scheduler.submit(Job(model, request), priority="high")      # from any thread
    scheduler.run()                                                   # or step(), by one thread

The policy names the next request; others whose step has an equal key join its call, as their mode allows and as far as
a larger call makes a row cheaper; those that still have to be prepared may go ahead of it to fill that call. With a
ledger, a request begins when its memory is promised. An error of a shared call is narrowed down to the request it
belongs to. `runner.Serial` and `Interleaved` are the plain twins: same bits.
"""

import heapq
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ..errors import CapacityError, RequestError
from ..loop import Key, Result, Unit
from .execute import Call, Executor, eager
from .job import Job, detach, out_of_memory, perform
from .ledger import Ledger, Need
from .merge import MERGED, Merger, rows_of
from .policy import HEAD_START, Policy, first_come
from .prices import Prices, label
from .sizes import shape_of

PREPARING = (Unit.EMBED, Unit.ENCODE)
_POLL = 0.005  # Seconds between two looks at memory that requests of another scheduler hold.
PATIENCE = 4  # Steps of others that a request lets pass for each place in its call they may come to fill.


@dataclass(slots=True)
class Group:
    """The jobs of one model and mode whose next step has this key: those who wait, how many there are, its label."""

    name: tuple[object, ...]
    key: Key
    label: str
    waiting: dict[int, "Entry"] = field(default_factory=dict)
    members: int = 0


@dataclass(slots=True)
class Entry:
    """A job in the scheduler: what policy and prices know of it.

    Seconds of `work` in all, `worked` so far and `left`; `steps` and `seconds` are of the `stage` it was last in,
    `later` those of the stages after that; `shares` says whether the pending step may be in a call with others'.
    """

    job: Job
    order: int
    arrived: float
    deadline: float | None
    priority: str
    kind: str
    work: float
    left: float
    need: Need | None
    pending: Call | None = None
    group: Group | None = None
    shares: bool = False
    score: float = 0.0
    ticket: int = 0
    begun: float | None = None
    worked: float = 0.0
    stage: int = 0
    steps: int = 0
    seconds: float = 0.0
    later: float = 0.0
    yielded: int = 0


class Scheduler:
    """Driven by one thread; `submit` and `Job.cancel` from any, `Job.feed` while nothing drives it.

    `rows` bounds a call in `throughput` mode; `relief` gives memory back to the device and says whether it gave any.
    """

    def __init__(
        self,
        *,
        policy: Policy = first_come,
        prices: Prices | None = None,
        ledger: Ledger | None = None,
        need: Callable[[Job], Need] | None = None,
        execute: Executor = eager,
        relief: Callable[[], bool] | None = None,
        rows: int = 32,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.prices = Prices() if prices is None else prices
        self.merger = Merger(execute)
        self._policy, self._ledger, self._need, self._execute = policy, ledger, need, execute
        self._relief, self._rows, self._clock = relief, rows, clock
        self._entries: dict[str, Entry] = {}
        self._inbox: deque[Entry] = deque()
        self._woken: deque[Entry] = deque()
        self._deferred: list[tuple[float, int, Entry]] = []
        self._ready: list[tuple[float, int, int, Entry]] = []
        self._groups: dict[tuple[object, ...], Group] = {}
        self._early: dict[int, Entry] = {}
        self._ceilings: dict[str, int] = {}
        self._orders = itertools.count()

    def submit(
        self, job: Job, *, priority: str = "normal", deadline: float | None = None, arrived: float | None = None
    ) -> Job:
        """Queue a job. Raises CapacityError, RequestError.

        `deadline` and `arrived` (now, unless it waited elsewhere before) are in seconds of the scheduler's clock.
        """
        if priority not in HEAD_START:
            raise RequestError("unknown priority", value=priority, choices=HEAD_START)
        need = None
        if self._ledger is not None and self._need is not None:
            need = self._need(job)
            self._ledger.require(need)
        kind = repr((job.model.card.digest, *shape_of(job.request)))
        work = self._later(job, kind, 0)
        arrived = self._clock() if arrived is None else arrived
        entry = Entry(job, next(self._orders), arrived, deadline, priority, kind, work, work, need)
        entry.score = self._policy(entry)
        job.wake = lambda: self._woken.append(entry)
        job.forecast = lambda left: self._forecast(entry, left)
        self._entries[job.id] = entry
        self._inbox.append(entry)
        return job

    def step(self) -> bool:
        """Run one call; False if no job can run."""
        if self._inbox or self._woken or self._deferred:
            self._admit()
        lead = self._lead()
        if lead is None:
            return self._make_room()
        if _stale(lead):
            self._withdraw(lead)
            self._next(lead)
            return True
        early = self._ahead_of(lead) if lead.shares and self._early else None
        if early is not None:
            self._push(lead)
            entries = [early]
        else:
            entries = self._partners(lead) if lead.shares else [lead]
        for entry in entries:
            self._withdraw(entry)
        self._run(entries)
        for entry in entries:
            self._next(entry)
        return True

    def run(self) -> None:
        """Step until no job can run, then keep what was learnt of prices."""
        with torch.no_grad():
            while self.step():
                pass
        self.prices.save()

    def ended(self, jobs: Sequence[Job]) -> Iterator[Job]:
        """Run until these have ended or no job can run; each as it ends."""
        left = list(jobs)
        while left:
            for job in [job for job in left if job.ended]:
                left.remove(job)
                yield job
            if left and not self._step():
                yield from left
                break
        self.prices.save()

    def _step(self) -> bool:
        with torch.no_grad():
            return self.step()

    def eta(self, job: Job) -> float | None:
        """In how many seconds a job will be done, as far as can be told: its own work and that of those before it."""
        entry = self._entries.get(job.id)
        if entry is None or not entry.work:
            return None
        place = (entry.score, entry.order)
        before = [other for other in list(self._entries.values()) if (other.score, other.order) < place]
        return sum(other.left for other in [*before, entry])

    def __len__(self) -> int:
        return len(self._entries)

    # --- who may begin

    def _admit(self) -> None:
        """Hear of what came from other threads; begin what there is memory for, in the policy's order."""
        while self._woken:
            self._awake(self._woken.popleft())
        while self._inbox:
            entry = self._inbox.popleft()
            heapq.heappush(self._deferred, (entry.score, entry.order, entry))
        while self._deferred and self._promised(self._deferred[0][-1]):
            entry = heapq.heappop(self._deferred)[-1]
            entry.begun = self._clock()
            self._turn(entry)
            self._next(entry)

    def _awake(self, entry: Entry) -> None:
        """The job was cancelled, or fed what it waited for."""
        if entry.job.id in self._entries and entry.begun is not None:
            self._withdraw(entry)
            self._next(entry)

    def _promised(self, entry: Entry) -> bool:
        if entry.need is None or self._ledger is None or entry.job.stopping:
            return True
        return self._ledger.reserve(entry.job.id, entry.need)

    def _make_room(self) -> bool:
        """Nobody runs here, yet somebody waits for memory. Who holds it: one that waits to be fed, another scheduler's
        request, which will give it back, or no request at all, and that has to go.
        """
        if not self._deferred or any(entry.begun is not None for entry in list(self._entries.values())):
            return False
        if self._relief is not None and self._relief():
            return True
        if self._ledger is not None and self._ledger.serving:
            time.sleep(_POLL)
            return True
        entry = heapq.heappop(self._deferred)[-1]
        entry.job.fail(CapacityError("memory promised to no request is not given back"))
        self._leave(entry)
        return True

    # --- whose step is next, and with whom

    def _next(self, entry: Entry) -> None:
        """File the job's next step; or let the job go, if it has ended."""
        job = entry.job
        pending = job.pending()
        if job.stage != entry.stage or job.ended:
            self._turn(entry)
        if job.ended:
            self._leave(entry)
        elif pending is not None:
            entry.pending = pending
            group = entry.group
            if group is None or group.key != pending.key:
                group = self._join(entry, pending.key)
            group.waiting[entry.order] = entry
            if job.request.mode != "exact":
                entry.shares = pending.step.unit in MERGED
                if pending.step.unit in PREPARING:
                    self._early[entry.order] = entry
            self._push(entry)

    def _push(self, entry: Entry) -> None:
        entry.score = self._policy(entry)
        entry.ticket += 1
        heapq.heappush(self._ready, (entry.score, entry.order, entry.ticket, entry))

    def _join(self, entry: Entry, key: Key) -> Group:
        """Move the job from the group it was in to that of its new key."""
        self._part(entry)
        name = (*_manner(entry), key)
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = Group(name, key, label(key))
        group.members += 1
        entry.group = group
        return group

    def _part(self, entry: Entry) -> None:
        group, entry.group = entry.group, None
        if group is not None:
            group.waiting.pop(entry.order, None)
            group.members -= 1
            if not group.members:
                del self._groups[group.name]

    def _withdraw(self, entry: Entry) -> None:
        """Take the job's step out of those that wait."""
        entry.ticket += 1
        if self._early:
            self._early.pop(entry.order, None)
        if entry.group is not None:
            entry.group.waiting.pop(entry.order, None)

    def _lead(self) -> Entry | None:
        while self._ready:
            _, _, ticket, entry = heapq.heappop(self._ready)
            if ticket == entry.ticket:
                return entry
        return None

    def _ahead_of(self, lead: Entry) -> Entry | None:
        """A request still to be prepared that may fill a place in the lead's call, if the lead has patience left."""
        group = lead.group
        assert group is not None
        free = self._limit(lead, group, self._rows) - len(group.waiting)
        mine = _manner(lead)
        others = [entry for entry in self._early.values() if _manner(entry) == mine] if free > 0 else []
        if not others or lead.yielded >= PATIENCE * free:
            lead.yielded = 0
            return None
        lead.yielded += 1
        return min(others, key=lambda entry: (entry.score, entry.order))

    def _partners(self, lead: Entry) -> list[Entry]:
        """The lead, and those who join its call, in the policy's order."""
        group = lead.group
        assert group is not None
        limit = self._limit(lead, group, len(group.waiting))
        others = [entry for entry in group.waiting.values() if entry is not lead]
        return [lead, *heapq.nsmallest(limit - 1, others, key=lambda entry: (entry.score, entry.order))]

    def _limit(self, lead: Entry, group: Group, waiting: int) -> int:
        """How many of so many requests the lead's call may serve."""
        request = lead.job.request
        if request.mode == "fixed":
            return request.rows
        limit = min(self._rows, self._ceilings.get(group.label, self._rows))
        if self._ledger is not None and lead.need is not None:
            limit = min(limit, self._ledger.rows(lead.job.id))
        return self.prices.rows(group.label, waiting, limit)

    # --- running, and what follows from an error

    def _run(self, entries: Sequence[Entry]) -> None:
        """One call for these jobs. An error ends the job it belongs to: smaller calls tell which."""
        error = self._call(entries)
        if error is not None and out_of_memory(error):
            self._lower(entries)
            if self._relief is not None and self._relief():
                error = self._call(entries)
        if error is None:
            return
        if len(entries) == 1:
            entries[0].job.fail(error)
            return
        half = len(entries) // 2
        self._run(entries[:half])
        self._run(entries[half:])

    def _call(self, entries: Sequence[Entry]) -> Exception | None:
        """Run the call and hand out its results; or the error it raised, which keeps no tensors alive."""
        begun = self._clock()
        try:
            results = self._results(entries)
        except Exception as error:
            detach(error)
            return error
        seconds = self._clock() - begun
        self._took(entries, seconds)
        for entry, result in zip(entries, results, strict=True):
            assert entry.pending is not None
            entry.job.complete(entry.pending, result, seconds)
        return None

    def _results(self, entries: Sequence[Entry]) -> list[Result]:
        lead = entries[0]
        assert lead.pending is not None
        if lead.shares:
            pendings = [entry.pending for entry in entries if entry.pending is not None]
            return self.merger.run([entry.job for entry in entries], pendings)
        return [perform(lead.job.model, lead.pending, self._execute)]

    def _lower(self, entries: Sequence[Entry]) -> None:
        """So many rows do not fit: ask for fewer from now on."""
        group = entries[0].group
        if group is not None:
            self._ceilings[group.label] = max(1, len(entries) // 2)

    # --- what it took, and what is left

    def _took(self, entries: Sequence[Entry], seconds: float) -> None:
        lead = entries[0]
        if lead.group is not None:
            rows = rows_of([entry.job for entry in entries]) if lead.shares else 1
            self.prices.learn(lead.group.label, rows, seconds)
        for entry in entries:
            entry.steps += 1
            entry.seconds += seconds
            entry.worked += seconds
            entry.left = max(0.0, entry.left - seconds)

    def _turn(self, entry: Entry) -> None:
        """The job has left the stage it was in: keep what that took, look at what is to come."""
        job = entry.job
        if job.stage > entry.stage and entry.steps:
            self.prices.learn_stage(entry.kind, job.stages[entry.stage].stage.name, entry.steps, entry.seconds)
        entry.stage, entry.steps, entry.seconds = job.stage, 0, 0.0
        entry.later = self._later(job, entry.kind, job.stage + 1)
        entry.left = self._later(job, entry.kind, job.stage)
        entry.work = entry.worked + entry.left

    def _later(self, job: Job, kind: str, first: int) -> float:
        """Seconds of the stages from `first` on; those that no such request has run yet count nothing."""
        found = [self.prices.stage(kind, bound.stage.name) for bound in job.stages[first:]]
        return sum(steps * seconds for steps, seconds in filter(None, found))

    def _forecast(self, entry: Entry, left: int) -> float:
        """Seconds until the job is done, if the others leave it as much of the device as so far."""
        each = entry.seconds / entry.steps
        if entry.steps == 1:  # the first step of a stage may have loaded its weights
            known = self.prices.stage(entry.kind, entry.job.stages[entry.stage].stage.name)
            each = each if known is None else known[1]
        assert entry.begun is not None
        slowdown = (self._clock() - entry.begun) / entry.worked if entry.worked else 1.0
        return (left * each + entry.later) * max(1.0, slowdown)

    def _leave(self, entry: Entry) -> None:
        """The job has ended: everything kept for it is given back."""
        job = entry.job
        self._part(entry)
        del self._entries[job.id]
        self.merger.forget(job)
        if self._ledger is not None:
            self._ledger.refund(job.id)
        job.wake = job.forecast = None


def _stale(entry: Entry) -> bool:
    """Whether weights have changed since the pending step was looked at: its key is of what is gone."""
    assert entry.pending is not None and isinstance(entry.pending.key, tuple)
    version = entry.job.model.version
    return any(version(name) != known for name, known in entry.pending.key[1])


def _manner(entry: Entry) -> tuple[int, str, int]:
    """What must be equal for two jobs ever to share a call."""
    request = entry.job.request
    return id(entry.job.model), request.mode, request.rows
