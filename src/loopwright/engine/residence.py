"""Where the components of a store live, and who may move them.

    residence = Residence()
    with Lease(residence, {"vae": resident}) as parts:      # on its device, and there to stay until the end
        parts["vae"](x)

A component loaded with `memory="high"` stays on its device. With "low" it lives on the host and comes when a step
needs it, and those of "low" that nobody uses then leave; experts, which are large and used by every step of a stage,
run layer by layer (`Layers`). Either can be sent away to make room (`release`); it comes back when it is next used.
A component that several models share is placed as the first of them loaded it. Moving changes no bit and no version.

Deliberately absent: budgets and admission. Whoever keeps addresses, as a captured graph does, keeps its lease open.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, cast

import torch

from ..backends.usage import settle

MEMORY = ("auto", "high", "low")
_ALIGNED = 64  # bytes, what torch gives to tensors of its own
ROOM = 0.25  # of a device's free memory is left for activations, unless their size is known


class Home(Protocol):
    """Moves one component between the host and its device. `exclusive`: one call at a time may use it."""

    exclusive: bool

    def bring(self) -> None:
        """Make it ready to run. If that fails nothing has moved."""

    def send(self) -> int:
        """Take its weights off the device; the bytes that gives back there."""

    def changed(self) -> None:
        """Its weights were changed in place: copies kept elsewhere are void."""


@dataclass(slots=True, eq=False)
class Resident:
    """A loaded component, where it came from, and the version of its weights.

    `bytes` of its weights and the `seconds` it took to load; `home` is None for what has no weights, and `low` says
    that it leaves its `device` by itself; `owners` is how many instances have it, which the store counts. `here`,
    `users`, `kept` (by how many who keep its addresses), `awaited` (by who wants it alone) and `used` (when, by the
    residence's clock) are the residence's own, and `checksum`, once it is known, the store's. `merged` names those of
    its weights that adapters were merged into since it had all of its weights from one place.
    """

    identity: tuple[object, ...]
    part: object
    version: int = 1
    bytes: int = 0
    seconds: float = 0.0
    device: str = ""
    home: Home | None = None
    low: bool = False
    owners: int = 0
    here: bool = True
    users: int = 0
    kept: int = 0
    awaited: bool = False
    used: int = 0
    checksum: str = ""
    merged: frozenset[str] = frozenset()

    @property
    def taken(self) -> bool:
        """Whether somebody uses it who shares it with nobody."""
        return self.users > 0 and self.home is not None and self.home.exclusive


class Residence:
    """Who is on the device and who is in use. Safe from any thread: components move under one lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = threading.Condition(self._lock)
        self._waiting = 0
        self._residents: list[Resident] = []
        self._clock = 0

    def add(self, resident: Resident) -> None:
        """Look after a component from now on."""
        with self._lock:
            self._residents.append(resident)

    def remove(self, resident: Resident) -> None:
        """Look after it no longer: nobody has it any more."""
        with self._lock:
            self._residents.remove(resident)

    def enter(self, residents: Sequence[Resident]) -> None:
        """Have these on their device, at once or not at all, until `leave`. Waits for one that is taken or awaited."""
        with self._lock:
            for resident in residents:
                if not resident.here or resident.awaited or (resident.users and resident.taken):
                    self._bring(residents)
                    break
            for resident in residents:
                resident.users += 1

    def leave(self, residents: Sequence[Resident]) -> None:
        """The end of what `enter` began."""
        with self._lock:
            self._clock += 1
            for resident in residents:
                resident.users -= 1
                resident.used = self._clock
            if self._waiting:  # asking first, since `enter` and `leave` are part of every step
                self._left.notify_all()

    def keep(self, residents: Sequence[Resident], change: int) -> None:
        """So many more who keep the addresses of these, which therefore are on their device and stay where they are."""
        with self._lock:
            if change > 0 and not all(resident.here for resident in residents):
                self._bring(residents)
            for resident in residents:
                resident.kept += change

    def release(self, device: str, wanted: int) -> int:
        """Send components that nobody uses to the host, the longest unused first, until `wanted` bytes are given back.

        The bytes given back; less than `wanted` if that was all, and 0 on a device that is the host.
        """
        freed = 0
        with self._lock:
            for resident in self._idle(device):
                if freed >= wanted:
                    break
                freed += _send(resident)
        return freed

    @contextmanager
    def still(self, resident: Resident) -> Iterator[None]:
        """The component is neither written to nor sent away until the end of the block, wherever it is."""
        with self._lock:
            resident.users += 1
        try:
            yield
        finally:
            self.leave([resident])

    @contextmanager
    def alone(self, resident: Resident) -> Iterator[None]:
        """Nobody uses the component, and nobody begins to, until the end of the block. Waits for those who do."""
        with self._lock:
            resident.awaited = True
            self._waiting += 1
            self._left.wait_for(lambda: not resident.users)
            self._waiting -= 1
            resident.awaited = False
            try:
                yield
            finally:
                self._left.notify_all()

    def renew(self, resident: Resident, version: int | None = None) -> None:
        """The component's weights were changed in place. `version` is the next one unless it is given."""
        with self._lock:
            resident.version = resident.version + 1 if version is None else version
            resident.checksum = ""
            if resident.home is not None:
                resident.home.changed()

    def _bring(self, residents: Sequence[Resident]) -> None:
        self._waiting += 1
        self._left.wait_for(lambda: not any(resident.taken or resident.awaited for resident in residents))
        self._waiting -= 1
        missing = [resident for resident in residents if not resident.here]
        for device in {resident.device for resident in missing if resident.low}:
            for other in self._idle(device):
                if other.low and other not in residents:
                    _send(other)
        for resident in missing:
            assert resident.home is not None
            resident.home.bring()
            resident.here = True

    def _idle(self, device: str) -> list[Resident]:
        found = [r for r in self._residents if r.home and r.here and not (r.users or r.kept) and r.device == device]
        return sorted(found, key=lambda resident: resident.used)


def _send(resident: Resident) -> int:
    assert resident.home is not None
    resident.here = False
    return resident.home.send()


class Lease:
    """Modules by name; while it is open they are on their device and stay there. May be opened any number of times."""

    __slots__ = ("_parts", "_residence", "_residents")

    def __init__(self, residence: Residence, residents: Mapping[str, Resident]) -> None:
        self._residence, self._residents = residence, tuple(residents.values())
        self._parts = {name: cast(torch.nn.Module, resident.part) for name, resident in residents.items()}

    def __enter__(self) -> Mapping[str, torch.nn.Module]:
        self._residence.enter(self._residents)
        return self._parts

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._residence.leave(self._residents)


class Hold:
    """For a `with` block in which the components stay where they are. Who keeps their addresses is not using them."""

    def __init__(self, residence: Residence, residents: Sequence[Resident]) -> None:
        self._residence, self._residents = residence, residents

    def __enter__(self) -> None:
        self._residence.keep(self._residents, 1)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._residence.keep(self._residents, -1)


class Whole:
    """All weights at once. The copy on the host is kept, pinned for CUDA, so that leaving costs nothing."""

    exclusive = False

    def __init__(self, module: torch.nn.Module, device: str) -> None:
        self._module, self._device = module, device
        self._kept: dict[torch.Tensor, torch.Tensor] = {}  # on the host, of tensors that are on the device
        if device.startswith("cuda"):
            for tensor in tensors_of(module):
                if self._at_home(tensor.data):
                    tensor.data = tensor.data.pin_memory()

    def bring(self) -> None:
        """Copy every tensor that is not there yet."""
        try:
            for tensor in tensors_of(self._module):
                data = tensor.data
                if self._at_home(data):
                    tensor.data = self._there(data)
                    self._kept[tensor] = data
        except BaseException:
            self.send()
            raise
        settle(self._device)  # another thread may use the weights on another stream

    def send(self) -> int:
        """Drop what is on the device; what has no copy on the host yet is copied first."""
        settle(self._device)
        freed = 0
        for tensor in tensors_of(self._module):
            data, kept = tensor.data, self._kept.pop(tensor, None)
            if not self._at_home(data):
                tensor.data = self._back(data) if kept is None else kept
                freed += size_of(data)
        return freed

    def changed(self) -> None:
        """What is on the device is newer than the copies."""
        self._kept.clear()

    def _at_home(self, data: torch.Tensor) -> bool:
        return data.device.type == "cpu"

    def _there(self, data: torch.Tensor) -> torch.Tensor:
        return data.to(self._device, non_blocking=True)

    def _back(self, data: torch.Tensor) -> torch.Tensor:
        pin = self._device.startswith("cuda")
        return torch.empty_like(data, device="cpu", pin_memory=pin).copy_(data)


class Layers:
    """A layer at a time, by diffusers' hooks on the module; on CUDA the next is copied while one computes.

    Nothing stays on the device between calls. One call at a time, because the hooks move the weights under it.
    """

    exclusive = True

    def __init__(self, module: torch.nn.Module, device: str) -> None:
        from diffusers.hooks import apply_group_offloading

        apply_group_offloading(
            module,
            onload_device=torch.device(device),
            offload_device=torch.device("cpu"),
            offload_type="block_level",
            num_blocks_per_group=1,
            use_stream=torch.device(device).type == "cuda",
        )

    def bring(self) -> None:
        """The hooks do, as the layers are called."""

    def send(self) -> int:
        """The hooks have."""
        return 0

    def changed(self) -> None:
        """Between calls the copy on the host is the only one."""


Homes = Callable[[torch.nn.Module, str, bool], Home]


def home_of(module: torch.nn.Module, device: str, layered: bool) -> Home:
    """How a module moves: layer by layer, or whole."""
    return Layers(module, device) if layered else Whole(module, device)


def choose(needed: int, free: int | None, activations: int | None = None) -> str:
    """ "high" if `needed` bytes of weights fit in `free` beside the activations (by default ROOM of it), else "low".

    `free` is None where weights lie on the host anyway: "high".
    """
    if free is None:
        return "high"
    return "high" if needed <= free - (int(free * ROOM) if activations is None else activations) else "low"


def tensors_of(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Parameters and buffers, each once however often the module names it."""
    yield from module.parameters()
    yield from module.buffers()


def size_of(tensor: torch.Tensor) -> int:
    """Bytes."""
    return tensor.numel() * tensor.element_size()


def align(module: torch.nn.Module) -> bool:
    """Move what lies at an odd address on the host, as what is mapped from a file does, and say whether anything does.

    The last bits of small products depend on it; afterwards they depend on the weights alone.
    """
    odd = [tensor for tensor in tensors_of(module) if tensor.data_ptr() % _ALIGNED]
    for tensor in odd:
        tensor.data = tensor.data.clone()
    return bool(odd)
