"""What a request will need, known before it runs: its steps run on tensors without storage, and bytes are counted.

    need = Sizes().need(instance, request)

Reads no weights and no pixels: modules are outlines, made from their configurations. A step is run once for each key.
Deliberately absent: what allocators and libraries take beside tensors; who admits leaves room for that.
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..caches.pool import Storage
from ..loop import Key, Result, Tensors
from ..request import Request
from .execute import Call, eager
from .instance import Instance
from .job import Job
from .ledger import Need
from .store import Store


class Sizes:
    """What requests of each shape need, found once a shape. Safe from any thread."""

    def __init__(self) -> None:
        self._needs: dict[tuple[object, ...], Need] = {}
        self._outlines: weakref.WeakKeyDictionary[Instance, Instance] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def need(self, instance: Instance, request: Request) -> Need:
        """What the request will need on the instance. Reads no weights."""
        shape = (instance.digest, instance.binding, *shape_of(request))
        with self._lock:
            if shape not in self._needs:
                if instance not in self._outlines:
                    self._outlines[instance] = outline(instance)
                self._needs[shape] = _sized(Job(self._outlines[instance], request))
            return self._needs[shape]


def outline(instance: Instance) -> Instance:
    """The same card with components that have shapes and no storage."""
    store = Store(0, pool_bytes=instance.store.pools.limit)
    adapters = instance.adapters
    return Instance(instance.card, instance.loops, store, device="meta", locate=instance.locate, adapters=adapters)


def shape_of(request: Request) -> tuple[object, ...]:
    """What of a request decides sizes and counts: everything but its words, its seed and its pixels' values."""
    words = ("prompt", "negative_prompt", "seed", "image", "video")
    values = tuple(getattr(request, field.name) for field in fields(request) if field.name not in words)
    return (*values, *(None if media is None else media.shape for media in (request.image, request.video)))


def _sized(job: Job) -> Need:
    """Run every step of the job on tensors without storage; a step whose key was seen before is not run again."""
    held, peak = 0, 0
    seen: dict[Key, tuple[Tensors, int]] = {}
    while (call := job.pending()) is not None:
        if call.key not in seen:
            seen[call.key] = _measured(job.model, call)
        tensors, took = seen[call.key]
        leased = sum(lease.bytes for lease in job.leases.values())
        held, peak = max(held, _bytes([job.slots, job.state]) + leased), max(peak, took)
        job.complete(call, Result(tensors, {name: [1.0] for name in call.step.reads}), 0.0)
    if job.error is not None:
        raise job.error
    rows = job.request.rows if job.request.mode == "fixed" else 1  # its calls always have so many
    return Need(held, peak * rows)


def _measured(model: Instance, call: Call) -> tuple[Tensors, int]:
    with _Live(call.storage) as live, _FusedAttention():
        tensors = eager(model, call)
    return tensors, live.peak


def _bytes(values: Iterable[object]) -> int:
    """Bytes of the distinct storages in nested records."""
    storages: dict[int, int] = {}

    def visit(value: object) -> None:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
        elif isinstance(value, Mapping):
            for item in value.values():
                visit(item)
        elif is_dataclass(value) and not isinstance(value, type):
            for field in fields(value):
                visit(getattr(value, field.name))
        elif isinstance(value, (tuple, list)):
            for item in value:
                visit(item)

    visit(list(values))
    return sum(storages.values())


class _Live(TorchDispatchMode):
    """Counts the bytes of storages that come to be while it is active, as they come and go. Pools were there before."""

    def __init__(self, pools: Mapping[str, Storage]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        tensors = [tensor for pool in pools.values() for tensor in pool.values()]
        self._known = {tensor.untyped_storage()._cdata for tensor in tensors}

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0  # Whoever looks at a value, as at a mask without padding, goes the general way.
        out = func(*args, **(kwargs or {}))
        for item in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(item, torch.Tensor):
                self._count(item.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())

    def _gone(self, name: int, count: int) -> None:
        self._known.discard(name)
        self.now -= count


class _FusedAttention(TorchFunctionMode):
    """Attention as fused kernels do it: tensors without storage would write out every score."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func is torch.nn.functional.scaled_dot_product_attention:
            named = dict(zip(("query", "key", "value"), args, strict=False)) | dict(kwargs or {})
            query, value = named["query"], named["value"]
            assert isinstance(query, torch.Tensor) and isinstance(value, torch.Tensor)
            return query.new_empty(*query.shape[:-1], value.shape[-1])
        return func(*args, **(kwargs or {}))
