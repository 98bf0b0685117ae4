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

import torch

from ..errors import CapacityError, RequestError, StateError
from ..loop import Key, Result, Unit
from .entry import Entry, Flight, Group
from .execute import Call, Executor, eager
from .flags import Flags
from .forecast import Forecasts
from .job import Job, detach, out_of_memory, perform
from .ledger import Ledger, Need
from .line import Line
from .merge import MERGED, Merger, rows_of, shares
from .policy import HEAD_START, Policy, first_come
from .prices import Prices, label
from .sizes import shape_of

PREPARING = (Unit.EMBED, Unit.ENCODE)
_POLL = 0.005  # Seconds between two looks at what others will give.
PATIENCE = 4  # Steps of others that a request lets pass for each place in its call they may come to fill.


class Scheduler:
    """Driven by one thread; `submit`, `Job.cancel` and `Job.feed` from any.

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
        self._forecasts = Forecasts(self.prices, clock)
        self._entries: dict[str, Entry] = {}
        self._inbox: deque[Entry] = deque()
        self._woken: deque[Entry] = deque()
        self._deferred: list[tuple[float, int, Entry]] = []
        self._ready = Line()
        self._groups: dict[tuple[object, ...], Group] = {}
        self._early: dict[tuple[int, str, int], Line] = {}
        self._ceilings: dict[str, int] = {}
        self._orders = itertools.count()
        self._flight: Flight | None = None
        self._left = 0  # how many jobs have
        self._seen = 0.0  # when the call before was seen to have ended

    def submit(
        self, job: Job, *, priority: str = "normal", deadline: float | None = None, arrived: float | None = None
    ) -> Job:
        """Queue a job. Raises CapacityError, RequestError, or StateError for one that is here already.

        `deadline` and `arrived` (now, unless it waited elsewhere before) are in seconds of the scheduler's clock.
        """
        if priority not in HEAD_START:
            raise RequestError("unknown priority", value=priority, choices=HEAD_START)
        if job.id in self._entries:
            raise StateError("the job is here already", value=job.id, remedy="make another one of the same request")
        need = None
        if self._ledger is not None and self._need is not None:
            need = self._need(job)
            self._ledger.require(need)
        arrived = self._clock() if arrived is None else arrived
        kind = repr((job.model.digest, *shape_of(job.request)))
        entry = Entry(job, next(self._orders), arrived, deadline, priority, kind, need)
        self._forecasts.turn(entry)
        entry.score = self._policy(entry)
        job.settle = self._settle
        job.wake = lambda: self._woken.append(entry)
        job.forecast = lambda steps: self._forecasts.until_done(entry, steps)
        self._entries[job.id] = entry
        self._inbox.append(entry)
        return job

    def step(self) -> bool:
        """Run one call; False if no job can run."""
        if self._inbox or self._woken or self._deferred:
            self._admit()
        lead = self._ready.pop()
        if lead is None:
            if self._flight is not None:
                self._settle()
                return True
            return self._make_room()
        if lead.stale:
            self._withdraw(lead)
            self._next(lead)
            return True
        early = self._ahead_of(lead) if lead.shares else None
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
        open_, seen = {id(job): job for job in jobs}, -1
        while open_:
            if seen != self._left:  # else nobody has ended
                seen = self._left
                for job in [job for job in open_.values() if job.ended]:
                    del open_[id(job)]
                    yield job
            if open_ and not self._step():
                yield from open_.values()
                break
        self.prices.save()

    def _step(self) -> bool:
        with torch.no_grad():
            return self.step()

    def eta(self, job: Job) -> float | None:
        """In how many seconds a job will be done, by its own work and that of those before it; None where its own
        cannot be told.
        """
        entry = self._entries.get(job.id)
        if entry is None or entry.later is None or not entry.work:
            return None
        place = (entry.score, entry.order)
        before = [other for other in list(self._entries.values()) if (other.score, other.order) < place]
        return sum(other.left for other in [*before, entry])

    @property
    def left(self) -> float:
        """Seconds of work that its jobs bring, as far as that has prices."""
        return sum(entry.left for entry in list(self._entries.values()))

    def __len__(self) -> int:
        return len(self._entries)

    # --- who may begin

    def _admit(self) -> None:
        """Hear of what came from other threads; begin what there is memory for, in the policy's order."""
        while self._inbox:
            entry = self._inbox.popleft()
            heapq.heappush(self._deferred, (entry.score, entry.order, entry))
        while self._woken:
            self._awake(self._woken.popleft())
        while self._deferred and self._promised(self._deferred[0][-1]):
            self._begin(heapq.heappop(self._deferred)[-1])

    def _awake(self, entry: Entry) -> None:
        """The job was cancelled, or fed what it waited for."""
        if entry.job.id not in self._entries:
            return
        if entry.begun:
            self._withdraw(entry)
            self._next(entry)
        elif entry.job.stopping:
            self._deferred = [item for item in self._deferred if item[-1] is not entry]
            heapq.heapify(self._deferred)
            self._begin(entry)

    def _begin(self, entry: Entry) -> None:
        entry.begun = True
        self._forecasts.turn(entry)
        self._next(entry)

    def _promised(self, entry: Entry) -> bool:
        if entry.need is None or self._ledger is None or entry.job.stopping:
            return True
        return self._ledger.reserve(entry.job.id, entry.need)

    def _make_room(self) -> bool:
        """Nobody runs here, yet somebody waits for new weights, or for memory. Who holds it: one that waits to be fed,
        another scheduler's request, which will give it back, or no request at all, and that has to go."""
        entries = list(self._entries.values())
        held = any(entry.job.held for entry in entries)
        if not held and (not self._deferred or any(entry.begun for entry in entries)):
            return False
        if not held and self._relief is not None and self._relief():
            return True
        if held or (self._ledger is not None and self._ledger.serving):
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
            self._forecasts.turn(entry)
        if job.ended:
            self._leave(entry)
        elif pending is not None:
            entry.pending = pending
            group = entry.group
            if group is None or group.key != pending.key:
                group = self._join(entry, pending.key)
            group.waiting[entry.order] = entry
            entry.shares = shares(pending.step.unit, job.request.mode)
            self._push(entry)
            if job.request.mode != "exact" and pending.step.unit in PREPARING:
                self._early.setdefault(entry.manner, Line()).push(entry)

    def _push(self, entry: Entry) -> None:
        entry.score = self._policy(entry)
        entry.ticket += 1
        self._ready.push(entry)

    def _join(self, entry: Entry, key: Key) -> Group:
        """Move the job from the group it was in to that of its new key."""
        self._part(entry)
        name = (*entry.manner, key)
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = Group(name, key, label(key))
        group.members += 1
        entry.group = group
        return group

    def _part(self, entry: Entry) -> None:
        if (empty := entry.part()) is not None:
            del self._groups[empty.name]

    def _withdraw(self, entry: Entry) -> None:
        """Take the job's step out of those that wait."""
        entry.ticket += 1
        if entry.group is not None:
            entry.group.waiting.pop(entry.order, None)

    def _ahead_of(self, lead: Entry) -> Entry | None:
        """A request still to be prepared that may fill a place in the lead's call, if the lead has patience left."""
        group, call = lead.group, lead.pending
        assert group is not None and call is not None
        if call.step.unit not in MERGED:  # who is to be prepared comes to denoising next
            return None
        free = self._limit(lead, group, self._rows) - len(group.waiting)
        early = self._early[lead.manner].first() if free > 0 and lead.manner in self._early else None
        if not lead.yielded:
            lead.patience = PATIENCE * free
        if early is None or lead.yielded >= lead.patience:
            lead.yielded = 0
            return None
        lead.yielded += 1
        return early

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
        """Ask for the call and hand out its results; or the error it raised, which keeps no tensors alive.

        The device may compute them still: only then is the call before looked at, so that there is always one to do.
        """
        begun, calls = self._clock(), [entry.pending for entry in entries if entry.pending is not None]
        try:
            results, flags = self._results(entries, calls)
        except Exception as error:
            detach(error)
            return error
        self._settle()
        lead = entries[0]
        rows = rows_of([entry.job for entry in entries]) if lead.shares else 1
        self._flight = Flight(entries, flags, begun, lead.group.label if lead.group else "", rows)
        for entry, call, result in zip(entries, calls, results, strict=True):
            entry.job.advance(call, result)
        if flags.ready:
            self._settle()
        return None

    def _results(self, entries: Sequence[Entry], calls: Sequence[Call]) -> tuple[list[Result], Flags]:
        lead = entries[0]
        if lead.shares:
            return self.merger.run([entry.job for entry in entries], calls)
        result, flags = perform(lead.job.model, calls[0], self._execute)
        return [result], flags

    def _settle(self) -> None:
        """See the last call to its end: what it took, whose results are not finite."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        try:
            finite, error = flight.flags.wait(), None
        except Exception as raised:  # the device fails at what it was asked for long ago
            detach(raised)
            finite, error = None, raised
        now = self._clock()
        seconds, self._seen = now - max(flight.begun, self._seen), now
        if flight.label:
            self.prices.learn(flight.label, flight.rows, seconds)
        for place, entry in enumerate(flight.entries):
            self._forecasts.took(entry, seconds)
            if error is not None and not entry.job.ended:
                entry.job.fail(error)
            entry.job.confirm(seconds, finite is None or finite[place])
            if entry.job.ended:
                self._withdraw(entry)
                self._leave(entry)

    def _lower(self, entries: Sequence[Entry]) -> None:
        """So many rows do not fit: ask for fewer from now on."""
        group = entries[0].group
        if group is not None:
            self._ceilings[group.label] = max(1, len(entries) // 2)

    def _leave(self, entry: Entry) -> None:
        """The job has ended: everything kept for it is given back."""
        job = entry.job
        if self._entries.pop(job.id, None) is None:
            return
        self._part(entry)
        entry.pending = None
        entry.ticket += 1
        self._left += 1
        self._tidy()
        self.merger.forget(job)
        if self._ledger is not None:
            self._ledger.refund(job.id)
        job.wake = job.forecast = job.settle = None

    def _tidy(self) -> None:
        """Keep nothing of those that have left."""
        for line in (self._ready, *self._early.values()):
            line.tidy(len(self._entries))
        self._early = {manner: line for manner, line in self._early.items() if len(line)}
