"""The components in memory, by what tells one from any other, and what is kept beside them for all who use them.

    store = Store()
    resident = store.get(identity, load, device="cuda")        # loaded by whoever comes first
    store.changed(resident)                                    # whatever came of its old weights is void

Deliberately absent: names of components, which are a model's own (`instance`).
"""

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
from .ledger import Ledger
from .prices import Prices
from .residence import Homes, Residence, Resident, home_of, size_of, tensors_of

FEATURE_BYTES = 512 * 2**20
POOL_BYTES = 2**30
SPARE = 0.08  # of a device's memory: contexts, workspaces, and what an allocator cannot use for its fragments


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a store has loaded: how many components, the bytes of their weights, the seconds that took in all."""

    components: int
    bytes: int
    seconds: float


class Watcher(Protocol):
    """Keeps something that a change of weights makes void."""

    def changed(self, identity: tuple[object, ...]) -> None:
        """The weights of the component of that identity are others now."""


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

    def changed(self, resident: Resident) -> None:
        """The component's weights were changed in place: whatever came of the old ones is void."""
        self.residence.renew(resident)
        self._void(resident)

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
