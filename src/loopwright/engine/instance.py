"""A model ready to run: a card, its loops, and its components, loaded when first used and shared by reference.

    store = Store()
    teacher = Instance(card, loops, store, device="cuda", locate=folder_of)
    student = Instance(student_card, loops, store, device="cuda", locate=folder_of)   # one autoencoder between them

A component is identified by where it comes from, its class, precision and device; whoever names the same gets the same
module. Each has a version, raised whenever its weights change, which is part of every step's key.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from ..caches.feature import FeatureCache
from ..card import Card, Component, Value, experts
from ..errors import CardError
from ..loop import Binding
from ..program import Loops, validate
from ..weights.load import load_component

Locate = Callable[[Card, Component], Path]


FEATURE_BYTES = 512 * 2**20


@dataclass(slots=True)
class Resident:
    """A loaded component, where it came from, and the version of its weights."""

    identity: tuple[object, ...]
    part: object
    version: int = 1


class Store:
    """The components in memory, by identity, and the features they computed. Several instances share one store.

    `feature_bytes` bounds the cache of embeddings; 0 switches it off.
    """

    def __init__(self, feature_bytes: int = FEATURE_BYTES) -> None:
        self.features = FeatureCache(feature_bytes)
        self._residents: dict[tuple[object, ...], Resident] = {}
        self._lock = threading.Lock()

    def get(self, identity: tuple[object, ...], load: Callable[[], object]) -> Resident:
        """The resident of that identity; `load` is called once, by whoever comes first."""
        with self._lock:
            resident = self._residents.get(identity)
            if resident is None:
                resident = self._residents[identity] = Resident(identity, load())
            return resident

    def __len__(self) -> int:
        return len(self._residents)


class Instance:
    """A card bound to a device. The card is checked before any weight is read.

    `locate` says in which folder a component's files lie (and fetches them if they are elsewhere).
    """

    def __init__(self, card: Card, loops: Loops, store: Store, *, device: str, locate: Locate) -> None:
        validate(card, loops)
        self.card, self.loops, self.store = card, loops, store
        self.binding = Binding(device, card.components[experts(card)[0]].dtype)
        self._locate = locate
        self._residents: dict[str, Resident] = {}

    @property
    def settings(self) -> Mapping[str, Value]:
        """The card's settings."""
        return self.card.settings

    def part(self, name: str) -> object:
        """The component, loaded on first use. Raises CardError for a name the card does not declare."""
        return self._resident(name).part

    def version(self, name: str) -> int:
        """The version of the component's weights, from 1."""
        return self._resident(name).version

    def changed(self, name: str) -> None:
        """The component's weights were changed in place: whatever was keyed by the old version is void."""
        resident = self._resident(name)
        resident.version += 1
        self.store.features.drop(resident.identity)

    def origin(self, name: str) -> tuple[object, ...]:
        """Where the component came from: the same for every instance that shares it."""
        return self._resident(name).identity

    def parts(self, names: tuple[str, ...]) -> Mapping[str, torch.nn.Module]:
        """The modules a step uses."""
        return {name: cast(torch.nn.Module, self._resident(name).part) for name in names}

    def _resident(self, name: str) -> Resident:
        resident = self._residents.get(name)
        if resident is None:
            resident = self._residents[name] = self._load(name)
        return resident

    def _load(self, name: str) -> Resident:
        component = self.card.components.get(name)
        if component is None:
            raise CardError(f"{self.card.name} has no such component", value=name, choices=self.card.components)
        folder = self._locate(self.card, component)
        device = self.binding.device if component.dtype else "host"
        identity = (folder.resolve(), component.subfolder, component.kind, component.dtype, device)
        return self.store.get(identity, lambda: load_component(component, folder, device))
