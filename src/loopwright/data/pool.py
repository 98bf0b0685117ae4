"""Who encodes: this process, or several workers that share out a machine.

    pool = pool_of(card, cache, slots("auto", workers=4), park=True)
    for want, problem in pool.make(wants):      # nothing is loaded or started before the first want
        ...

Workers are colocated with whatever else computes on their GPUs, or dedicated: the last GPUs of the machine are theirs.
`park` sends the encoders to host memory between bursts. One worker is this process itself; more are actors of Ray.
"""

import importlib.util
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ..backends.device import pick
from ..card import Card
from ..errors import BackendError, RequestError
from .cache import Cache
from .wants import Want
from .worker import Worker

SHARE = 0.3  # of a GPU that something else computes on as well


@dataclass(frozen=True, slots=True)
class Slot:
    """A worker's device, and how much of a GPU that counts as with Ray."""

    device: str
    share: float


class Pool(Protocol):
    """Makes entries of a cache. Safe from any thread; one burst after another."""

    def make(self, wants: Iterable[Want]) -> Iterator[tuple[Want, str]]:
        """Each want once it is made, in any order, with what is wrong with its row or "".

        Takes a want only when a worker is free for it. Raises what is nobody's row's fault.
        """

    def close(self) -> None:
        """End what was started. A later burst starts it anew."""


def slots(device: str = "auto", workers: int = 1, *, dedicated: bool = False) -> tuple[Slot, ...]:
    """A slot for each worker: all GPUs in turn for "cuda", or the last ones where they are dedicated.

    Raises RequestError for a device that is not here, or more workers than it has room for.
    """
    chosen, gpus = pick(device), torch.cuda.device_count() if torch.cuda.is_available() else 0
    if workers < 1:
        raise RequestError("workers must be at least 1", value=workers)
    if dedicated:
        if chosen != "cuda" or workers > gpus:
            raise RequestError(
                "dedicated encoders need a GPU each", value=f"{workers} on {chosen}", remedy=f"there are {gpus} GPUs"
            )
        return tuple(Slot(f"cuda:{index}", 1.0) for index in range(gpus - workers, gpus))
    if workers == 1 or not chosen.startswith("cuda"):
        return (Slot(chosen, 0.0),) * workers
    devices = [f"cuda:{index}" for index in range(gpus)] if chosen == "cuda" else [chosen]
    if workers > (most := int(1 / SHARE) * len(devices)):
        raise RequestError("too many workers for the GPUs", value=workers, remedy=f"{most} at most")
    return tuple(Slot(devices[index % len(devices)], SHARE) for index in range(workers))


def pool_of(card: Card, cache: Cache, where: Sequence[Slot], *, park: bool = False) -> Pool:
    """The pool of a worker in each slot. Raises BackendError for several where Ray is not installed."""
    if len(where) == 1:
        return Here(Worker(card, cache, where[0].device), park=park)
    if importlib.util.find_spec("ray") is None:
        remedy = "pip install 'loopwright[train]', or give one worker"
        raise BackendError("several encoder workers need Ray, which is not installed", remedy=remedy)
    from .fleet import Fleet

    return Fleet(card, cache, where, park=park)


class Here:
    """This process as the only worker."""

    def __init__(self, worker: Worker, *, park: bool) -> None:
        self._worker, self._park = worker, park
        self._encoding = threading.Lock()

    def make(self, wants: Iterable[Want]) -> Iterator[tuple[Want, str]]:
        """One after another, in their order."""
        for want in wants:
            with self._encoding:
                problem = self._worker.make(want)
            yield want, problem
        if self._park:
            with self._encoding:
                self._worker.park()

    def close(self) -> None:
        """Nothing was started."""
