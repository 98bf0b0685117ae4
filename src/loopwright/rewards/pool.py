"""A reward in processes of its own: as many scores at a time as there are, and none that can end or hang the run.

    score = Pool("ocr", {"frames": 1}, workers=8, timeout=30)
    score(samples)          # as OCR(frames=1) would
    score.close()

A worker that throws, dies or does not answer in time costs nobody else's score: it is replaced, and its samples are
tried again, each by itself; the one that fails again has no score, and the reason is counted. Samples travel over pipes
as msgpack. Deliberately absent: other machines; a service there is `remote`'s.
"""

import os
import queue
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from ..errors import RequestError
from .choose import Value, named
from .reward import Sample
from .worker import Lost, Worker

BATCH, BYTES = 16, 2**28  # samples that a worker gets at once, and bytes of their frames


class Pool:
    """A reward run by name (`choose.build`) with its parameters in `workers` processes, one thread each.

    `timeout` is the seconds a worker has for up to 16 samples. Raises RequestError if a worker cannot begin. Safe from
    several threads.
    """

    def __init__(
        self, name: str, parameters: Mapping[str, Value] | None = None, workers: int = 0, timeout: float = 60.0
    ) -> None:
        if workers < 0 or timeout <= 0:
            value = f"{workers} workers, {timeout:g} s"
            raise RequestError("a pool needs workers and time", value=value, remedy="0 workers are one a core")
        count = workers or os.cpu_count() or 1
        self.failures: Counter[str] = Counter()
        self._name, self._parameters, self._timeout = name, dict(parameters or {}), timeout
        self._idle: queue.SimpleQueue[Worker | None] = queue.SimpleQueue()
        self._counting = threading.Lock()
        for worker in self._begun(count):
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="reward")
        self._size = count

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        """A score a sample, None for those that no worker could score."""
        largest = max((sample.frames.nbytes for sample in samples), default=1)
        size = max(1, min(BATCH, -(-len(samples) // self._size), BYTES // max(largest, 1)))
        parts = [samples[start : start + size] for start in range(0, len(samples), size)]
        return [score for scores in self._threads.map(self._scores, parts) for score in scores]

    def wanted(self, samples: Sequence[Sample]) -> Sequence[object]:
        """As the reward's own; nothing where it has none. Raises RequestError."""
        reads = getattr(named(self._name), "wanted", None)
        return [] if reads is None else list(reads(samples))

    def close(self) -> None:
        """End the workers, once they have answered."""
        self._threads.shutdown(cancel_futures=True)
        while not self._idle.empty():
            if (worker := self._idle.get()) is not None:
                worker.end()

    def _begun(self, count: int) -> list[Worker]:
        """Workers that are starting side by side. Raises RequestError if one cannot, and then ends them all."""
        workers = [Worker(self._name, self._parameters) for _ in range(count)]
        try:
            for worker in workers:
                worker.ready()
        except BaseException:
            for worker in workers:
                worker.end()
            raise
        return workers

    def _scores(self, samples: Sequence[Sample]) -> list[float | None]:
        """Together, else each by itself."""
        try:
            return self._asked(samples)
        except Lost:
            return [self._alone(sample) for sample in samples]

    def _alone(self, sample: Sample) -> float | None:
        try:
            return self._asked([sample])[0]
        except Lost as lost:
            with self._counting:
                self.failures[str(lost)] += 1
            return None

    def _asked(self, samples: Sequence[Sample]) -> list[float | None]:
        """What a worker says. Raises Lost; one that has died or hangs is ended, and another takes its place later."""
        worker = self._idle.get()
        try:
            if worker is None:
                (worker,) = self._begun(1)
            return worker.score(samples, self._timeout)
        except Lost as lost:
            if lost.ended:
                worker = None
            raise
        finally:
            self._idle.put(worker)
