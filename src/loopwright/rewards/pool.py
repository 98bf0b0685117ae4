"""A reward in processes of its own: as many scores at a time as there are, and none that can end or hang the run.

    score = Pool("ocr", {"frames": 1}, workers=8, timeout=30)
    score(samples)          # as OCR(frames=1) would
    score.close()

A worker that throws, dies or does not answer in time costs nobody else's score: it is replaced, and its samples are
tried again, each by itself; the one that fails again has no score, and the reason is counted. One that cannot be
replaced leaves its work to the others, and is tried again at the next call. Samples travel over pipes as msgpack.
Deliberately absent: other machines; a service there is `remote`'s.
"""

import os
import threading
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from ..errors import RequestError
from .choose import Value, named
from .reward import Sample
from .worker import Lost, Worker

BATCH, BYTES = 16, 2**28  # samples that a worker gets at once, and bytes of their frames


@dataclass
class _Part:
    """Samples that a worker gets at once: where they stand among all, and whether they have failed before."""

    start: int
    samples: Sequence[Sample]
    again: bool = False


@dataclass
class _Call:
    """What a call has left to do, from which workers take what they do, and the scores so far."""

    left: deque[_Part]
    scores: list[float | None]
    unbegun: list[str] = field(default_factory=list)  # why workers could not

    def parts(self) -> Iterator[_Part]:
        """What is left, each to one thread alone, what is put back meanwhile as well."""
        while self.left:
            try:
                part = self.left.popleft()
            except IndexError:  # another thread has taken the last one
                return
            yield part


class Pool:
    """A reward run by name (`choose.build`) with its parameters in `workers` processes, one thread each.

    `timeout` is the seconds a worker has for up to 16 samples, from their sending to their scores. Raises RequestError
    if a worker cannot begin. Asked by several threads it answers one after the other.
    """

    def __init__(
        self, name: str, parameters: Mapping[str, Value] | None = None, workers: int = 0, timeout: float = 60.0
    ) -> None:
        if workers < 0 or timeout <= 0:
            value = f"{workers} workers, {timeout:g} s"
            raise RequestError("a pool needs workers and time", value=value, remedy="0 workers are one a core")
        self.failures: Counter[str] = Counter()
        self._name, self._parameters, self._timeout = name, dict(parameters or {}), timeout
        self._asked, self._counting = threading.Lock(), threading.Lock()
        self._workers: list[Worker | None] = [*self._begun(workers or os.cpu_count() or 1)]

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        """A score a sample, None for those that no worker could score."""
        call = _Call(deque(self._parts(samples)), [None] * len(samples))
        with self._asked, ThreadPoolExecutor(len(self._workers), "reward") as threads:
            try:
                self._share(call, threads)
            finally:
                call.left.clear()  # who interrupts waits for what has begun and no more
        return call.scores

    def wanted(self, samples: Sequence[Sample]) -> Sequence[object]:
        """As the reward's own; nothing where it has none. Raises RequestError."""
        reads = getattr(named(self._name), "wanted", None)
        return [] if reads is None else list(reads(samples))

    def close(self) -> None:
        """End the workers, once they have answered."""
        with self._asked:
            _end(self._workers)
            self._workers.clear()

    def _begun(self, count: int) -> list[Worker]:
        """Workers that are starting side by side. Raises RequestError if one cannot, and then ends them all."""
        workers: list[Worker] = []
        try:
            for _ in range(count):
                workers.append(Worker(self._name, self._parameters))
            for worker in workers:
                worker.ready()
        except BaseException:
            _end(workers)
            raise
        return workers

    def _parts(self, samples: Sequence[Sample]) -> Iterator[_Part]:
        largest = max((sample.frames.nbytes for sample in samples), default=1)
        size = max(1, min(BATCH, -(-len(samples) // len(self._workers)), BYTES // max(largest, 1)))
        return (_Part(start, samples[start : start + size]) for start in range(0, len(samples), size))

    def _share(self, call: _Call, threads: ThreadPoolExecutor) -> None:
        """Let workers take parts until none is left, or no worker: those that cannot begin put theirs back."""
        places = list(range(len(self._workers)))
        while call.left and places:
            there = list(threads.map(lambda place: self._work(place, call), places))
            places = [place for place, fine in zip(places, there, strict=True) if fine]
        for part in call.left:
            self._count(call.unbegun[-1], len(part.samples))

    def _work(self, place: int, call: _Call) -> bool:
        """Whether the worker of that place could do its share."""
        for part in call.parts():
            try:
                worker = self._workers[place] = self._workers[place] or self._begun(1)[0]
            except RequestError as error:
                call.unbegun.append(str(error))
                call.left.appendleft(part)
                return False
            self._score(place, worker, part, call)
        return True

    def _score(self, place: int, worker: Worker, part: _Part, call: _Call) -> None:
        """Together, later each by itself. A worker that has died or hangs is ended; another takes its place."""
        try:
            call.scores[part.start : part.start + len(part.samples)] = worker.score(part.samples, self._timeout)
        except Lost as lost:
            if lost.ended:
                self._workers[place] = None
            if part.again:
                self._count(str(lost), len(part.samples))
            else:
                alone = (_Part(part.start + n, [one], again=True) for n, one in enumerate(part.samples))
                call.left.extend(alone)

    def _count(self, reason: str, samples: int) -> None:
        with self._counting:
            self.failures[reason] += samples


def _end(workers: Sequence[Worker | None]) -> None:
    for worker in filter(None, workers):
        worker.end()
