"""The components in memory, by what tells one from any other, and what is kept beside them for all who use them.

    store = Store()
    resident = store.get(identity, load, device="cuda")        # loaded by whoever comes first
    store.changed(resident)                                    # whatever came of its old weights is void
    store.weights(resident)                                    # Weights(version=2, checksum="3f9c...")

Deliberately absent: names of components, which are a model's own (`instance`).
"""

import itertools
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from ..backends.device import probe
from ..backends.usage import settle, total_bytes
from ..caches.feature import FeatureCache
from ..caches.pool import Pools
from ..errors import CapacityError
from ..weights.sync import checksum
from .ledger import Ledger, gib
from .prices import Prices
from .residence import Homes, Residence, Resident, home_of, size_of, tensors_of

GIVEN, OWN = "given", "own"  # whose weights no file has: modules of somebody else's, and those replaced here
FEATURE_BYTES = 512 * 2**20
POOL_BYTES = 2**30
SPARE = 0.08  # of a device's memory: contexts, workspaces, and what an allocator cannot use for its fragments


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a store has loaded: how many components, the bytes of their weights, the seconds that took in all."""

    components: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Weights:
    """Which weights a component has: a number that grows, and a checksum of what it computes with.

    The checksum is "" for a module that somebody else has and trains.
    """

    version: int
    checksum: str

    def record(self) -> dict[str, int | str]:
        """As JSON values."""
        return {"version": self.version, "checksum": self.checksum}


class Watcher(Protocol):
    """Keeps something that reads a component's weights where they lie."""

    def changed(self, identity: tuple[object, ...]) -> None:
        """The weights of the component of that identity may lie elsewhere now, or nowhere."""


class Store:
    """The components in memory, by identity, and the features they computed. Several instances share one store.

    `feature_bytes` bounds the cache of embeddings; 0 switches it off. `pool_bytes` is the size of each pool of pages
    that requests lease. `homes` says how a module moves. What calls cost
    on a device is kept in a file of the folder `prices`, if one is given.
    """

    def __init__(
        self,
        feature_bytes: int = FEATURE_BYTES,
        *,
        pool_bytes: int = POOL_BYTES,
        homes: Homes = home_of,
        prices: Path | None = None,
    ) -> None:
        self.features = FeatureCache(feature_bytes)
        self.pools = Pools(pool_bytes)
        self._folder = prices
        self._prices: dict[str, Prices] = {}
        self._ledgers: dict[str, Ledger] = {}
        self.residence = Residence()
        self._homes = homes
        self._residents: dict[tuple[object, ...], Resident] = {}
        self._watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    @property
    def loaded(self) -> Loaded:
        """What it took to load everything that is here."""
        residents = list(self._residents.values())
        return Loaded(len(residents), sum(r.bytes for r in residents), sum(r.seconds for r in residents))

    def get(
        self,
        identity: tuple[object, ...],
        load: Callable[[], object],
        *,
        device: str = "host",
        low: bool = False,
        layered: bool = False,
    ) -> Resident:
        """The resident of that identity; `load` is called once, by whoever comes first.

        Where `low` it loads on the host and comes to its device for the steps that use it, `layered` a layer at a time.
        """
        with self._lock:
            resident = self._residents.get(identity)
            if resident is None:
                begun = time.perf_counter()
                resident = self._residents[identity] = Resident(identity, load(), device=device, low=low, here=not low)
                if isinstance(resident.part, torch.nn.Module):
                    resident.bytes = sum(map(size_of, tensors_of(resident.part)))
                    resident.home = self._homes(resident.part, device, layered)
                    self.residence.add(resident)
                settle(device)
                resident.seconds = time.perf_counter() - begun
            resident.owners += 1
            return resident

    def leave(self, resident: Resident) -> None:
        """One instance less has it. With the last it goes, and with it what it computed and what was captured of it."""
        with self._lock:
            resident.owners -= 1
            if resident.owners:
                return
            del self._residents[resident.identity]
            ledgers = list(self._ledgers.values())
        if resident.home is not None:
            self.residence.remove(resident)
        for ledger in ledgers:
            ledger.give_back(resident.identity)
        self._void(resident)

    def prices(self, device: str) -> Prices:
        """What calls cost on that device, as learnt so far; everybody's that uses this store."""
        with self._lock:
            if device not in self._prices:
                found = probe(device)
                name = "-".join(f"{found.arch} {found.name}".lower().split())
                self._prices[device] = Prices(self._folder and self._folder / f"{name}.json")
            return self._prices[device]

    def ledger(self, device: str) -> Ledger | None:
        """Who is promised what of that device's memory; None for the host, which is not ours alone."""
        total = total_bytes(device)
        if total is None:
            return None
        with self._lock:
            if device not in self._ledgers:
                self._ledgers[device] = Ledger(int(total * (1 - SPARE)))
                self._ledgers[device].set_aside("features", self.features.limit)
                self._ledgers[device].set_aside("pools", lambda: self.pools.idle_bytes(device))
            return self._ledgers[device]

    def watch(self, watcher: Watcher) -> None:
        """Tell the watcher of changed weights for as long as it lives."""
        with self._lock:
            self._watchers.add(watcher)

    def changed(self, resident: Resident, *, version: int | None = None, moved: bool = True) -> None:
        """The component's weights were changed in place: whatever came of the old ones is void.

        Unless they `moved`, the new ones lie where the old ones lay, and graphs that read them there are as good as
        before. `version` is the next one unless it is given.
        """
        self.residence.renew(resident, version)
        if moved:
            self._void(resident)
        else:
            self.features.drop(resident.identity)

    def own(self, resident: Resident) -> None:
        """From now on its weights are not what its files hold: whoever wants those loads them anew."""
        if is_own(resident):
            return
        old = resident.identity
        self._void(resident)
        with self._lock:
            self._residents.pop(old, None)
            resident.identity = self._name(old)
            self._residents[resident.identity] = resident
            ledgers = list(self._ledgers.values())
        for ledger in ledgers:
            ledger.rename(old, resident.identity)

    def twin(self, resident: Resident, copy: Callable[[], object]) -> Resident:
        """A copy beside it, which has no owner yet. Raises CapacityError where requests leave no room for it."""
        name, ledger = self._name(resident.identity), self.ledger(resident.device)
        if ledger is not None and not ledger.spare(name, resident.bytes):
            raise CapacityError(
                f"there is no room for a second copy of these weights ({gib(resident.bytes)}) beside the requests",
                remedy='use policy="drain", which needs none',
            )
        try:
            part = copy()
        except BaseException:
            if ledger is not None:
                ledger.give_back(name)
            raise
        assert isinstance(part, torch.nn.Module)
        twin = Resident(name, part, resident.version, resident.bytes, device=resident.device)
        twin.merged = resident.merged
        twin.home = self._homes(part, resident.device, False)
        self.residence.add(twin)
        with self._lock:
            self._residents[name] = twin
        return twin

    def weights(self, resident: Resident) -> Weights:
        """Which weights it has now. The first who asks for the checksum waits until they have been read once."""
        if not resident.checksum and resident.identity[0] != GIVEN:
            assert isinstance(resident.part, torch.nn.Module)
            with self.residence.still(resident):
                state = resident.part.state_dict()
                outline = any(tensor.is_meta for tensor in state.values())
                resident.checksum = "outline" if outline else checksum(state)
        return Weights(resident.version, resident.checksum)

    def _name(self, old: tuple[object, ...]) -> tuple[object, ...]:
        """Of weights that no file holds, which came of those of that name."""
        return (OWN, next(self._numbers), *(old[2:] if old[0] == OWN else old))

    def _void(self, resident: Resident) -> None:
        self.features.drop(resident.identity)
        with self._lock:
            watchers = list(self._watchers)
        for watcher in watchers:
            watcher.changed(resident.identity)

    def release(self, device: str, wanted: int) -> int:
        """Send idle components to the host until `wanted` bytes of the device are free again; the bytes that gave."""
        return self.residence.release(device, wanted)

    def __contains__(self, identity: object) -> bool:
        return identity in self._residents

    def __len__(self) -> int:
        return len(self._residents)


def is_own(resident: Resident) -> bool:
    """Whether its weights were replaced since they were loaded."""
    return resident.identity[0] == OWN
