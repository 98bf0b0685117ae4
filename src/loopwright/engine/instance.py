"""A model ready to run: a card, its loops, and its components, loaded when first used and shared by reference.

    store = Store()
    teacher = Instance(card, loops, store, device="cuda", locate=folder_of)
    student = Instance(student_card, loops, store, device="cuda", locate=folder_of)   # one autoencoder between them

    with teacher.using(("vae",)) as parts:      # on the device until the end of the block
        parts["vae"].decode(latents)

A component is identified by where it comes from, its class, precision and device; whoever names the same gets the same
module. Each has a version, raised whenever its weights change, which is part of every step's key. Where components live
between steps is `residence`'s business.
"""

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ..backends.compile import compile_blocks, require_compiler
from ..backends.device import probe
from ..backends.precision import DTYPES, FLOAT8, torch_dtype
from ..backends.registry import require, require_precision
from ..backends.usage import free_bytes
from ..card import Card, Component, Value, experts
from ..errors import BackendError, CardError, StaleError
from ..loop import Binding, Key
from ..program import Loops, validate
from ..request import ATTENTION, KERNELS, Request
from ..weights import lora
from ..weights.load import load_component, stored_bytes
from .crew import Crew
from .ledger import Ledger
from .residence import Hold, Lease, Resident, choose
from .store import GIVEN, Store, Weights, is_own

Locate = Callable[[Card, Component], Path]
Prepare = Callable[[Component, object], None]
OUTLINE = "meta"  # torch's device of tensors without storage: it computes nothing, so every choice is as good there


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


def _check_adapters(card: Card, adapters: Sequence[lora.Use]) -> None:
    """Raise where a component cannot have adapters: 8-bit layers have no room for them."""
    for use in adapters:
        if use.scale and card.components[use.component].dtype == FLOAT8:
            raise BackendError(
                f"adapters run on layers of plain precision, and component {use.component!r} has",
                value=FLOAT8,
                choices=DTYPES[:-1],
                remedy="load it in one of these, or without adapters",
            )


class Instance:
    """A card bound to a device. The card is checked before any weight is read.

    `locate` says in which folder a component's files lie (and fetches them if they are elsewhere). `prepare` is the
    family's hook on a component just loaded, through which requests choose attention and kernels. `memory` is "high",
    "low" or "auto" (`residence`). With `compile` the blocks of the generators are compiled, and `adapters` run on the
    generators they name; such a generator is a component of its own, beside the plain one of another instance.

    `crew` are the jobs under way. Where these keep weights that are replaced beside them, `successor` is the instance
    with the new ones; this one lets go of the old when the last of its crew has ended. `proved` are the keys and
    rows of which it is known that a row's bits depend on nobody, by whoever ran them first.
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
        memory: str = "high",
        compile: bool = False,
        adapters: Sequence[lora.Use] = (),
    ) -> None:
        validate(card, loops)
        _check_precision(card, device)
        _check_adapters(card, adapters)
        if compile:
            require_compiler(device)
        self.card, self.loops, self.store = card, loops, store
        self.digest = card.digest  # hashing a card takes as long as many steps
        self.adapters = tuple(adapters)
        running = "; ".join(f"{use.component} {use.adapter.digest} {use.scale!r}" for use in self._running())
        dtype = card.components[experts(card)[0]].dtype
        self.binding = Binding(device, dtype, compile=compile, adapters=running)
        self._generators = tuple(card.components[name] for name in experts(card))
        self.locate, self.prepare = locate, prepare
        self._bindings: set[Binding] = set()
        self._memory, self._choosing = memory, threading.Lock()
        self._residents: dict[str, Resident] = {}
        self._loading = threading.Lock()
        self._leases: dict[tuple[str, ...], Lease] = {}
        self.crew = Crew()
        self.successor: Instance | None = None
        self._retired = False
        self.proved: set[tuple[Key, int]] = set()

    @property
    def memory(self) -> str:
        """ "high" or "low". Asked to choose, it locates the weights and compares their size with what is free now."""
        with self._choosing:
            if self._memory == "auto":
                free = free_bytes(self.binding.device)
                self._memory = choose(0 if free is None else self._missing(), free)
            return self._memory

    @property
    def settings(self) -> Mapping[str, Value]:
        """The card's settings."""
        return self.card.settings

    def bind(self, request: Request) -> Binding:
        """What the request's steps are bound to. Raises BackendError for attention or kernels not available here."""
        ours = self.binding
        if ours.device == OUTLINE:
            return ours
        binding = replace(ours, attention=request.attention, kernels=request.kernels)
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

    def put(self, name: str, module: torch.nn.Module) -> None:
        """Run a module that is in memory already as that component, such as one in training; before its first use.

        Only this instance does. Tell it by `changed` whenever the weights have changed.
        """
        assert name in self.card.components and name not in self._residents
        device = self.binding.device
        self._residents[name] = self.store.get((GIVEN, id(module)), lambda: module, device=device)

    @property
    def loaded(self) -> Mapping[str, int]:
        """The components that are in memory, with the versions of their weights."""
        return {name: resident.version for name, resident in self._residents.items()}

    def unload(self) -> None:
        """Let go of the components: those that no other instance has leave memory. They are loaded when next used.

        Between steps, and with no request of this instance's under way.
        """
        with self._loading:
            residents, self._residents, self._leases = self._residents, {}, {}
        for resident in residents.values():
            self.store.leave(resident)

    def version(self, name: str) -> int:
        """The version of the component's weights, from 1."""
        return self._resident(name).version

    def weights(self) -> dict[str, Weights]:
        """Which weights the generators have that are in memory, and every component whose weights were replaced."""
        here = {name: self._residents[name] for name in experts(self.card) if name in self._residents}
        return {name: self.store.weights(one) for name, one in here.items()} | self.replaced()

    def replaced(self) -> dict[str, Weights]:
        """Those of the components whose weights are not those of their files."""
        return {name: self.store.weights(one) for name, one in list(self._residents.items()) if is_own(one)}

    def changed(self, name: str, *, moved: bool = True) -> None:
        """The component's weights were changed in place: whatever was keyed by the old version is void.

        Unless they `moved`, they were written where the old ones lay, and captured graphs go on with them.
        """
        self.store.changed(self._resident(name), moved=moved)

    def resident(self, name: str) -> Resident:
        """The component with what the store knows of it, for who replaces its weights."""
        return self._resident(name)

    def twin(self, name: str, fill: Callable[[torch.nn.Module], None]) -> Resident:
        """A copy of the component, given to `fill`, of nobody's yet.

        Raises CapacityError where there is no room for it, BackendError for weights that come and go.
        """
        resident, component = self._resident(name), self.card.components[name]
        if resident.low:
            raise BackendError(
                "a second copy needs weights that stay on the device, and these come and go",
                value=name,
                remedy='load the model with memory="high", or replace weights with policy="drain"',
            )

        def copied() -> torch.nn.Module:
            part = copy.deepcopy(resident.part)
            assert isinstance(part, torch.nn.Module)
            fill(part)
            if self._compiles(component):
                compile_blocks(part)
            return part

        return self.store.twin(resident, copied)

    def take(self, name: str, resident: Resident) -> None:
        """Run that one as the component from now on; the one before is left to others who have it. Between steps."""
        old = self._resident(name)
        resident.owners += 1
        self._residents[name], self._leases = resident, {}
        self.store.leave(old)

    def succeeded(self, name: str, resident: Resident) -> "Instance":
        """The successor, which runs that one as the component. `retire` is due when nobody is under way here."""
        new = copy.copy(self)
        new._residents, new._leases, new.crew = {**self._residents, name: resident}, {}, Crew()
        for each in new._residents.values():
            each.owners += 1
        self.successor = new
        return new

    def retire(self) -> None:
        """Let go of all components, for good."""
        self._retired = True
        self.unload()

    def origin(self, name: str) -> tuple[object, ...]:
        """Where the component came from: the same for every instance that shares it."""
        return self._resident(name).identity

    def parts(self, names: tuple[str, ...]) -> Mapping[str, torch.nn.Module]:
        """The modules a step uses, on their device for now; `using` keeps them there."""
        with self.using(names) as parts:
            return parts

    def using(self, names: tuple[str, ...]) -> Lease:
        """The modules of those names for a `with` block, on their device until its end."""
        lease = self._leases.get(names)
        if lease is None:
            residents = {name: self._resident(name) for name in names}
            lease = self._leases[names] = Lease(self.store.residence, residents)
        return lease

    def hold(self, names: tuple[str, ...]) -> Hold:
        """For who keeps the weights' addresses. Raises BackendError for weights that come and go."""
        moving = [name for name in names if self._resident(name).low]
        if moving:
            raise BackendError(
                "captured graphs need weights that stay where they are, and these come and go",
                value=", ".join(moving),
                remedy='load the model with memory="high", or run without graphs',
            )
        return Hold(self.store.residence, [self._resident(name) for name in names])

    def _resident(self, name: str) -> Resident:
        resident = self._residents.get(name)
        if resident is None:
            with self._loading:
                resident = self._residents.get(name)
                if resident is None:
                    resident = self._residents[name] = self._load(name)
        return resident

    def _load(self, name: str) -> Resident:
        component = self.card.components.get(name)
        if component is None:
            raise CardError(f"{self.card.name} has no such component", value=name, choices=self.card.components)
        if self._retired:
            raise StaleError("the weights of this instance have been replaced", remedy="use its successor")
        folder, identity = self._identity(component)
        if not component.dtype:
            return self.store.get(identity, lambda: self._loaded(component, folder, "host"))
        device, low = self.binding.device, self.memory == "low"
        if low and self._compiles(component):
            raise BackendError(
                "compiled blocks need weights that stay where they are, and these come and go",
                value=name,
                remedy='load the model with memory="high" or compile=False',
            )
        return self.store.get(
            identity,
            lambda: self._loaded(component, folder, "cpu" if low else device),
            device=device,
            low=low,
            layered=low and name in experts(self.card),
        )

    def _loaded(self, component: Component, folder: Path, device: str) -> object:
        part = load_component(component, folder, device)
        if running := self._running(component):
            assert isinstance(part, torch.nn.Module)
            lora.attach(part, [(use.adapter, use.scale) for use in running])
        if self.prepare is not None:
            self.prepare(component, part)
        if self._compiles(component):
            assert isinstance(part, torch.nn.Module)
            compile_blocks(part)
        return part

    def _compiles(self, component: Component) -> bool:
        return self.binding.compile and component in self._generators

    def _running(self, component: Component | None = None) -> list[lora.Use]:
        """The adapters that count for something: of a component, or all."""
        ours = [use for use in self.adapters if use.scale]
        return [use for use in ours if component is None or self.card.components[use.component] == component]

    def _identity(self, component: Component) -> tuple[Path, tuple[object, ...]]:
        """The folder of the component's files, and what tells the component from any other."""
        folder = self.locate(self.card, component)
        device = self.binding.device if component.dtype else "host"
        form: tuple[object, ...] = ("compiled",) if self._compiles(component) else ()
        form += tuple((use.adapter.digest, use.scale) for use in self._running(component))
        return folder, (folder.resolve(), component.subfolder, component.kind, component.dtype, device, *form)

    def set_aside(self, ledger: Ledger) -> None:
        """Keep this model's weights out of what requests are promised: all of them, or the largest if they come and go.

        Locates the weights. Those that other models share are counted once.
        """
        sizes = {}
        for name, component in self.card.components.items():
            if component.dtype:
                folder, identity = self._identity(component)
                known = self._residents.get(name)
                sizes[identity if known is None else known.identity] = self._bytes(component, folder)
        if self.memory == "low":
            largest = max(sizes, key=sizes.__getitem__)
            sizes = {largest: sizes[largest]}
        for identity, count in sizes.items():
            ledger.set_aside(identity, count)

    def _missing(self) -> int:
        """Bytes of the weights that are still to be loaded."""
        weighted = [component for component in self.card.components.values() if component.dtype]
        located = [(component, *self._identity(component)) for component in weighted]
        return sum(self._bytes(c, folder) for c, folder, identity in located if identity not in self.store)

    def _bytes(self, component: Component, folder: Path) -> int:
        """Of the component's weights and of its adapters, which take its dtype."""
        width = torch_dtype(component.dtype).itemsize
        matrices = [tensor for use in self._running(component) for tensor in use.adapter.tensors.values()]
        return stored_bytes(component, folder) + sum(tensor.numel() * width for tensor in matrices)
