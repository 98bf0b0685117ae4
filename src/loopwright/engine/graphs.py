"""An executor that captures whole steps as graphs: the op's kernels are launched at once, without its Python.

    graphs = Graphs(limit=4 * 2**30, ledger=ledger)
    scheduler = Scheduler(execute=graphs, relief=graphs.relief, ledger=ledger)
    graphs.breaks                               # {"... denoise_step ...": "why it runs eagerly"}

A graph belongs to a key (op, components, binding, shapes, static values), a number of rows, and the very components:
with any other it is another graph. Its plain twin is the executor it wraps: same bits. It reads weights where they lie,
so it is as good for other versions written to the same place; any other change of weights removes the graphs of that
component and no others. Graphs of steps of the same shape share a pool of memory; pools leave, longest unused first,
where they hold more than `limit` bytes or the ledger has no room. What cannot be captured runs eagerly from then on:
named in `breaks`, with a warning.

Deliberately absent: padding a call to rows that have a graph. That is for whoever makes calls.
"""

import itertools
import threading
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from ..backends.capture import Capture, capture_on
from ..loop import Tensors, Unit, versionless
from .captured import Captured
from .execute import Call, Executor, eager
from .instance import Instance
from .job import detach
from .ledger import Ledger, Need, gib
from .prices import label

# Many small steps of one key; encoders and autoencoders run a few times a request.
UNITS = (Unit.DENOISE, Unit.TOKEN, Unit.CHUNK)
LIMIT = 8 * 2**30
_PATIENCE = 4  # how many times longer a step runs eagerly before it is captured again, after it had to leave


@dataclass(slots=True, eq=False)
class _Pool:
    """Graphs that share a capture's memory, and what of the ledger is theirs."""

    capture: Capture
    holders: list[str] = field(default_factory=list)
    entries: "list[_Entry]" = field(default_factory=list)
    used: int = 0
    bytes: int = 0


@dataclass(slots=True, eq=False)
class _Entry:
    """What is known of calls of one key and number of rows: how many ran eagerly, how many should, their graph.

    `wanted` is what the graph took when there was no room for it; `held` gives back its weights and its promise.
    """

    origins: tuple[Hashable, ...]
    after: int
    broken: bool
    calls: int = 0
    graph: Captured | None = None
    pool: _Pool | None = None
    held: ExitStack | None = None
    wanted: int = 0


class Graphs:
    """Safe from any thread: capturing and replaying happen under one lock.

    `capture` makes the capture of a device; `units` are those worth a graph; `after` so many eager calls (at least 1) a
    step is captured; `limit` bounds the bytes of all graphs; in the `ledger` they are holders "graph:...".
    """

    def __init__(
        self,
        capture: Callable[[str], Capture] = capture_on,
        *,
        execute: Executor = eager,
        units: Sequence[Unit] = UNITS,
        after: int = 1,
        limit: int = LIMIT,
        ledger: Ledger | None = None,
    ) -> None:
        assert after >= 1, "the first call loads, compiles and tunes, which cannot be captured"
        self._capture, self._execute, self._units, self._after = capture, execute, frozenset(units), after
        self._limit, self._ledger = limit, ledger
        self._entries: dict[Hashable, _Entry] = {}
        self._pools: dict[Hashable, _Pool] = {}
        self._breaks: dict[str, str] = {}
        self._clock, self._names = itertools.count(1), itertools.count(1)
        self._lock = threading.Lock()
        self.replays = 0

    @property
    def breaks(self) -> Mapping[str, str]:
        """Which calls run eagerly although their unit is worth a graph, and why."""
        return dict(self._breaks)

    @property
    def bytes(self) -> int:
        """Held by all graphs."""
        return sum(map(_size, list(self._pools.values())))

    def __len__(self) -> int:
        return sum(entry.graph is not None for entry in list(self._entries.values()))

    def __call__(self, model: Instance, call: Call) -> Tensors:
        """Run the call: by its graph if it has one, else eagerly."""
        if call.step.unit not in self._units:
            return self._execute(model, call)
        origins = tuple([model.origin(name) for name in call.step.uses])
        name = (versionless(call.key), call.rows, origins, model.store)  # another store has modules of its own
        with self._lock:
            entry = self._entries.get(name)
            if entry is None:
                entry = self._entries[name] = _Entry(origins, self._after, _title(call) in self._breaks)
            if entry.graph is not None and entry.pool is not None:
                entry.pool.used = next(self._clock)
                self.replays += 1
                with model.using(call.step.uses):  # else they might be written to meanwhile
                    return entry.graph.replay(call)
        tensors = self._execute(model, call)
        if not entry.broken:
            with self._lock:
                entry.calls += 1
                if entry.calls >= entry.after and entry.graph is None and self._entries.get(name) is entry:
                    self._record(entry, model, call)
        return tensors

    def relief(self) -> bool:
        """Give back what all graphs hold. Whether that was anything."""
        with self._lock:
            held = bool(self._pools)
            for pool in list(self._pools.values()):
                self._evict(pool)
            return held

    def rest(self) -> None:
        """Give it all back for a while: steps are captured again as soon as they were at first."""
        with self._lock:
            for pool in list(self._pools.values()):
                self._evict(pool, patience=1)

    def changed(self, identity: tuple[object, ...]) -> None:
        """The weights of the component of that identity lie elsewhere, or are gone: its graphs are void."""
        with self._lock:
            stale = {name: entry for name, entry in self._entries.items() if identity in entry.origins}
            for name, entry in stale.items():
                del self._entries[name]
                pool = self._let_go(entry)
                if pool is not None and not pool.entries:
                    self._evict(pool)

    # --- all of this under the lock

    def _record(self, entry: _Entry, model: Instance, call: Call) -> None:
        """Capture the call, which has just run eagerly; or find out that there is no way, or no room."""
        if not self._has_room(entry.wanted):
            return
        pool = self._pool(model.binding.device, call)
        before, held = pool.bytes, ExitStack()
        try:
            held.enter_context(model.hold(call.step.uses))
            entry.graph = Captured(pool.capture, call, lambda own: self._execute(model, own))
        except Exception as error:
            held.close()
            detach(error)
            self._break(entry, call, _reason(error))
        else:
            model.store.watch(self)
            entry.pool, entry.held, pool.bytes = pool, held, pool.capture.bytes
            pool.entries.append(entry)
            pool.used = next(self._clock)
            self._settle(entry, pool, pool.bytes - before, call)
        if not pool.entries and pool in self._pools.values():
            self._evict(pool)

    def _settle(self, entry: _Entry, pool: _Pool, grown: int, call: Call) -> None:
        """Find room for what was captured; without any, let it go again."""
        assert entry.graph is not None and entry.held is not None
        others = sorted((other for other in self._pools.values() if other is not pool), key=lambda other: other.used)
        while self.bytes > self._limit and others:
            self._evict(others.pop(0))
        if _size(pool) > self._limit:
            size = gib(_size(pool))
            self._break(entry, call, f"graphs of its shape would hold {size}, the limit is {gib(self._limit)}")
            self._evict(pool)  # the memory it grew by is the pool's now, and goes with it alone
            return
        wanted = entry.graph.bytes + grown
        while not self._reserve(entry, pool, grown):
            if not others:
                entry.wanted = wanted
                self._evict(pool)
                return
            self._evict(others.pop(0))

    def _reserve(self, entry: _Entry, pool: _Pool, grown: int) -> bool:
        """Have both promised, or neither: inputs, given back with the graph, and what the pool has grown by."""
        ledger = self._ledger
        if ledger is None:
            return True
        assert entry.graph is not None and entry.held is not None
        inputs, memory = (f"graph:{next(self._names)}{what}" for what in ("", ":memory"))
        if not ledger.reserve(inputs, Need(entry.graph.bytes, 0)):
            return False
        if not ledger.reserve(memory, Need(grown, 0)):
            ledger.refund(inputs)
            return False
        entry.held.callback(ledger.refund, inputs)
        pool.holders.append(memory)
        return True

    def _has_room(self, wanted: int) -> bool:
        """Whether the ledger has, as far as is known before capturing."""
        if not wanted or self._ledger is None:
            return True
        trial = f"graph:{next(self._names)}:trial"
        room = self._ledger.reserve(trial, Need(wanted, 0))
        self._ledger.refund(trial)
        return room

    def _pool(self, device: str, call: Call) -> _Pool:
        """Branches, experts and numbers of rows of one shape never run at once, so they share."""
        name = (device, *[(name, tensor.shape[1:], tensor.dtype) for name, tensor in call.tensors.items()])
        pool = self._pools.get(name)
        if pool is None:
            pool = self._pools[name] = _Pool(self._capture(device))
        return pool

    def _let_go(self, entry: _Entry) -> _Pool | None:
        """Drop the entry's graph; the pool it was in."""
        pool, held = entry.pool, entry.held
        entry.graph = entry.pool = entry.held = None
        if held is not None:
            held.close()
        if pool is not None:
            pool.entries.remove(entry)
        return pool

    def _evict(self, pool: _Pool, patience: int = _PATIENCE) -> None:
        """Drop the graphs of a pool and give its memory back."""
        self._pools = {name: other for name, other in self._pools.items() if other is not pool}
        for entry in list(pool.entries):
            self._let_go(entry)
            entry.calls, entry.after = 0, patience * entry.after
        pool.capture.release()
        for holder in pool.holders:
            assert self._ledger is not None
            self._ledger.refund(holder)

    def _break(self, entry: _Entry, call: Call, reason: str) -> None:
        entry.broken = True
        title = _title(call)
        self._breaks[title] = reason
        warnings.warn(f"not captured, runs eagerly: {title}: {reason}", RuntimeWarning, stacklevel=2)


def _size(pool: _Pool) -> int:
    return pool.bytes + sum(entry.graph.bytes for entry in list(pool.entries) if entry.graph is not None)


def _title(call: Call) -> str:
    """The call as text, the same for every version of its weights."""
    return f"{call.rows} x {label(call.key)}"


def _reason(error: Exception) -> str:
    """The first error of a chain: leaving a recording that failed raises another one."""
    first: BaseException = error
    while (earlier := first.__cause__ or first.__context__) is not None:
        first = earlier
    return f"{type(first).__name__}: {str(first).strip().splitlines()[0] if str(first).strip() else ''}".rstrip(": ")
