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

from ..backends.device import probe
from ..backends.precision import DTYPES, FLOAT8
from ..backends.registry import require, require_precision
from ..caches.feature import FeatureCache
from ..card import Card, Component, Value, experts
from ..errors import BackendError, CardError
from ..loop import Binding
from ..program import Loops, validate
from ..request import ATTENTION, KERNELS, Request
from ..weights.load import load_component

Locate = Callable[[Card, Component], Path]
Prepare = Callable[[Component, object], None]
OUTLINE = "meta"  # torch's device of tensors without storage: it computes nothing, so every choice is as good there


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


def _check_precision(card: Card, device: str) -> None:
    """Raise where a component has a precision that it or the device cannot have."""
    for name, component in card.components.items():
        if component.dtype == FLOAT8 and name not in experts(card):
            raise CardError(
                f"card {card.name}: component {name!r} has a precision for generators alone",
                value=FLOAT8,
                choices=DTYPES[:-1],
                remedy="set the component's dtype to one of these",
            )
        if device != OUTLINE:
            require_precision(probe(device), component.dtype)


class Instance:
    """A card bound to a device. The card is checked before any weight is read.

    `locate` says in which folder a component's files lie (and fetches them if they are elsewhere). `prepare` is the
    family's hook on a component just loaded, through which requests choose attention and kernels.
    """

    def __init__(
        self,
        card: Card,
        loops: Loops,
        store: Store,
        *,
        device: str,
        locate: Locate,
        prepare: Prepare | None = None,
    ) -> None:
        validate(card, loops)
        _check_precision(card, device)
        self.card, self.loops, self.store = card, loops, store
        self.binding = Binding(device, card.components[experts(card)[0]].dtype)
        self._locate, self.prepare = locate, prepare
        self._bindings: set[Binding] = set()
        self._residents: dict[str, Resident] = {}

    @property
    def settings(self) -> Mapping[str, Value]:
        """The card's settings."""
        return self.card.settings

    def bind(self, request: Request) -> Binding:
        """What the request's steps are bound to. Raises BackendError for attention or kernels not available here."""
        ours = self.binding
        if ours.device == OUTLINE:
            return ours
        binding = Binding(ours.device, ours.precision, request.attention, request.kernels)
        if binding not in self._bindings:
            if self.prepare is None and (binding.attention, binding.kernels) != (ATTENTION, KERNELS):
                raise BackendError(
                    f"models of family {self.card.family} run under torch's own choice of kernels alone",
                    value=f"attention {binding.attention}, kernels {binding.kernels}",
                    choices=(f"attention {ATTENTION}, kernels {KERNELS}",),
                )
            require(probe(ours.device), ours.precision, attention=binding.attention, kernels=binding.kernels)
            self._bindings.add(binding)
        return binding

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
        return self.store.get(identity, lambda: self._loaded(component, folder, device))

    def _loaded(self, component: Component, folder: Path, device: str) -> object:
        part = load_component(component, folder, device)
        if self.prepare is not None:
            self.prepare(component, part)
        return part
