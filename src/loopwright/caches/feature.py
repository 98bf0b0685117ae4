"""Embeddings computed once: a cache by content, bounded in bytes, shared by every request of a process.

    features = FeatureCache(limit=512 * 2**20)
    out = features.compute(owner, key, lambda: encode(ids))     # a second call with the key computes nothing

Entries belong to an owner (a component): when its weights change, `drop(owner)` removes its entries and no others.
Whoever asks for a key that another thread is computing waits for that result. Deliberately absent: eviction by time.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping

import torch

Features = Mapping[str, torch.Tensor]


class FeatureCache:
    """Least recently used entries leave first. `limit` in bytes; 0 keeps nothing. What it returns is read only."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.hits = self.misses = self.bytes = 0
        self._entries: OrderedDict[tuple[Hashable, Hashable], Features] = OrderedDict()
        self._computing: dict[tuple[Hashable, Hashable], threading.Lock] = {}
        self._lock = threading.Lock()

    def compute(self, owner: Hashable, key: Hashable, make: Callable[[], Features]) -> Features:
        """The entry of that key; made by `make`, once, if there is none."""
        name = (owner, key)
        with self._lock:
            gate = self._computing.setdefault(name, threading.Lock())
        with gate:
            try:
                found = self._find(name)
                if found is None:
                    found = make()
                    self._keep(name, found)
                return found
            finally:
                with self._lock:
                    self._computing.pop(name, None)

    def drop(self, owner: Hashable) -> None:
        """Forget the owner's entries."""
        with self._lock:
            for name in [name for name in self._entries if name[0] == owner]:
                self._forget(name)

    def __len__(self) -> int:
        return len(self._entries)

    def _find(self, name: tuple[Hashable, Hashable]) -> Features | None:
        with self._lock:
            found = self._entries.get(name)
            if found is None:
                self.misses += 1
            else:
                self.hits += 1
                self._entries.move_to_end(name)
            return found

    def _keep(self, name: tuple[Hashable, Hashable], made: Features) -> None:
        with self._lock:
            self._entries[name] = made
            self.bytes += _size(made)
            while self.bytes > self.limit:
                self._forget(next(iter(self._entries)))

    def _forget(self, name: tuple[Hashable, Hashable]) -> None:
        self.bytes -= _size(self._entries.pop(name))


def content(tensors: Features) -> str:
    """A hash of names, shapes, dtypes and values."""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _size(tensors: Features) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
