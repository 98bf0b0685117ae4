"""Encoder workers as actors of Ray: hired for the first want, kept for every later burst, replaced when they die.

    fleet = Fleet(card, cache, slots("cuda", workers=8), park=True)
    for want, problem in fleet.make(wants): ...
    fleet.close()

Uses the Ray that this process is connected to, else starts one of its own on this machine and stops it in the end.
Wants and answers travel as JSON; tensors do not, since workers write into the cache themselves.
"""

import json
import os
import threading
import traceback
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias, cast

from ..card import Card, dumps, loads
from ..distributed import local_ray
from ..errors import LoopwrightError
from .cache import Cache
from .wants import Want

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

    from .pool import Slot

    Hired: TypeAlias = "ActorHandle[Actor]"

LIVES = 2  # workers that a want may cost before it is its row's problem
DEATHS = 3  # in a row for each slot, with nothing made between, after which it is not the rows
PATIENCE = 300.0  # seconds for workers to start


class PoolError(LoopwrightError):
    """Encoder workers cannot be had, or keep dying."""


class Actor:
    """A worker in a process of its own."""

    def __init__(self, order: str) -> None:
        import torch

        from .worker import Worker

        given = json.loads(order)
        os.chdir(given["folder"])  # paths mean here what they mean there
        torch.set_num_threads(given["threads"])
        card = loads(given["card"], home=given["home"])
        self._worker = Worker(card, Cache(given["cache"]), given["device"])

    def ready(self) -> None:
        """Answers once the process has started."""

    def make(self, want: str) -> str:
        """As `Worker.make`, in JSON: the row's problem, or what else went wrong."""
        try:
            return json.dumps({"problem": self._worker.make(Want.loads(want))})
        except LoopwrightError as error:
            return json.dumps({"error": str(error)})
        except Exception:
            return json.dumps({"bug": traceback.format_exc()})

    def park(self) -> None:
        """As `Worker.park`."""
        self._worker.park()


class Fleet:
    """A worker in each slot."""

    def __init__(self, card: Card, cache: Cache, where: "Sequence[Slot]", *, park: bool) -> None:
        self.size = len(where)
        self._card, self._cache, self._slots, self._park = card, cache, tuple(where), park
        self._hired: dict[int, Hired] = {}  # by slot
        self._own = False
        self._burst = threading.Lock()

    def make(self, wants: Iterable[Want]) -> Iterator[tuple[Want, str]]:
        """As workers get ready. Whatever breaks a burst off ends the workers too."""
        with self._burst:
            try:
                yield from _Burst(self, wants).run()
                self._rest()
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """End the workers, and Ray if it is ours."""
        if not self._hired and not self._own:  # Ray need not even be imported
            return
        import ray

        for actor in self._hired.values():
            ray.kill(actor)
        self._hired.clear()
        if self._own:
            ray.shutdown()
            self._own = False

    def hired(self) -> "dict[int, Hired]":
        """The workers, by slot."""
        if not self._hired:
            gpus = len({slot.device for slot in self._slots if slot.share})
            self._own |= local_ray.begin(cpus=len(self._slots), gpus=gpus)
            self.hire(range(len(self._slots)))
        return self._hired

    def hire(self, slots: Iterable[int]) -> None:
        """Start workers in these slots. Raises PoolError for those that do not begin."""
        import ray

        fresh = {slot: self._actor(self._slots[slot]) for slot in slots}
        self._hired |= fresh
        calls: list[ObjectRef[None]] = [actor.ready.remote() for actor in fresh.values()]
        begun, late = ray.wait(calls, num_returns=len(calls), timeout=PATIENCE)
        if late:
            remedy = "ask for fewer workers, or make room"
            raise PoolError("Ray has no room for the encoder workers", value=f"{len(late)} wait", remedy=remedy)
        try:
            ray.get(begun)
        except ray.exceptions.RayActorError as error:
            reason = str(error).strip().splitlines()[-1]
            raise PoolError(f"an encoder worker ended before it began ({reason})") from error

    def _actor(self, slot: "Slot") -> "Hired":
        import ray

        threads = max(1, (os.cpu_count() or 1) // len(self._slots))
        order = {
            "folder": os.getcwd(),
            "card": dumps(self._card),
            "home": self._card.home,
            "cache": str(self._cache.folder),
            "device": slot.device,
            "threads": threads,
        }
        shown = local_ray.all_gpus() if slot.share else None
        kind = ray.remote(Actor).options(num_cpus=1, num_gpus=slot.share, runtime_env=shown)
        return cast("Hired", kind.remote(json.dumps(order)))

    def _rest(self) -> None:
        if self._park and self._hired:
            import ray

            ray.get([actor.park.remote() for actor in self._hired.values()])


class _Burst:
    """One run of a fleet over wants: a want at a time for each worker, so that a death has one cause."""

    def __init__(self, fleet: Fleet, wants: Iterable[Want]) -> None:
        self._fleet, self._wants = fleet, iter(wants)
        self._again: deque[Want] = deque()
        self._busy: dict[ObjectRef[str], tuple[int, Want]] = {}
        self._cost: Counter[str] = Counter()  # workers, by the name of the want they died of
        self._deaths = 0

    def run(self) -> Iterator[tuple[Want, str]]:
        """All wants, in the order in which they are done."""
        while self._employ():
            want, problem = self._first_done()
            if problem is not None:
                yield want, problem

    def _employ(self) -> bool:
        """Give every idle worker a want, while there are any; whether somebody works."""
        while len(self._busy) < self._fleet.size and (want := self._next()) is not None:
            taken = {slot for slot, _ in self._busy.values()}
            slot, actor = next(item for item in self._fleet.hired().items() if item[0] not in taken)
            self._busy[actor.make.remote(want.dumps())] = slot, want
        return bool(self._busy)

    def _first_done(self) -> tuple[Want, str | None]:
        """The want that is done first, with its row's problem; None for one that is to be made again."""
        import ray

        (done,), _ = ray.wait(list(self._busy), num_returns=1)
        slot, want = self._busy.pop(done)
        try:
            answer = json.loads(ray.get(done))
        except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError) as error:
            return want, self._died(slot, want, str(error).strip().splitlines()[0])
        self._deaths = 0
        return want, _problem(answer)

    def _next(self) -> Want | None:
        return self._again.popleft() if self._again else next(self._wants, None)

    def _died(self, slot: int, want: Want, reason: str) -> str | None:
        """Replace the worker; the want's problem if it has cost too many, else it is made again."""
        self._deaths += 1
        if self._deaths >= DEATHS * self._fleet.size:
            raise PoolError(f"encoder workers keep dying ({reason})", remedy="they may lack memory: ask for fewer")
        self._fleet.hire([slot])
        self._cost[want.key.name] += 1
        if self._cost[want.key.name] >= LIVES:
            return f"ended {LIVES} encoder workers ({reason})"
        self._again.append(want)
        return None


def _problem(answer: dict[str, str]) -> str:
    """The row's problem. Raises what is not the row's."""
    if "bug" in answer:
        raise RuntimeError(f"in an encoder worker:\n{answer['bug']}")
    if "error" in answer:
        raise PoolError(answer["error"])
    return answer["problem"]
