"""A half-finished job as one safetensors file, to be continued later or in another process, with identical output.

    save(job, "job.safetensors")                   # or, in two steps, of which the second needs no engine:
    snapshot(job).write("job.safetensors")
    job = restore(model, "job.safetensors")

The file holds the request, the card's digest, which adapters and which replaced weights ran, the place in the program,
the slots, the loop's state and the contents of the pages it leases, with the versions of the weights they came of:
under others all that is no good. States are dataclasses of plain values and tensors; nothing is pickled. Deliberately
absent: weights.
"""

import json
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..caches.lease import Lease
from ..errors import CapacityError, StateError
from ..files import replacing
from ..loop import Page
from ..request import Frames, Request, from_json, to_json
from .instance import Instance
from .job import Job, Listener, Observer

FORMAT = 5
_TENSOR = "/tensor"  # marks a tensor's name; no slot or field is called that


@dataclass(frozen=True, slots=True)
class _Leased:
    """A lease as a file holds it: contents [pages, ...]."""

    page: Page
    versions: dict[str, int]
    contents: dict[str, torch.Tensor]

    @classmethod
    def of(cls, lease: Lease) -> "_Leased":
        return cls(lease.pool.page, lease.versions, dict(lease.export()))

    def on(self, model: Instance) -> Lease:
        lease = Lease(model.store.pools.get(model.binding.device, self.page), self.versions)
        lease.fill(self.contents)
        return lease


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A job as it stood between two steps, in memory of its own: whatever becomes of the job, this can be written."""

    head: Mapping[str, object]
    tensors: Mapping[str, torch.Tensor]
    pixels: Mapping[str, Frames]

    @property
    def bytes(self) -> int:
        """Of its tensors, the request's pixels included."""
        return sum(t.nbytes for t in self.tensors.values()) + sum(len(f.data) for f in self.pixels.values())

    def write(self, path: str | Path) -> None:
        """Write it, atomically. Raises OSError."""
        given = {f"pixels/{name}": torch.frombuffer(bytearray(f.data), dtype=torch.uint8) for name, f in
                 self.pixels.items()}  # fmt: skip
        with replacing(Path(path)) as temporary:
            save_file({**self.tensors, **given}, temporary, metadata={"job": json.dumps(self.head)})


def snapshot(job: Job) -> Snapshot:
    """Copy what continues the job; call it as its steps are run, between two. Raises StateError if it has ended."""
    if job.ended:
        raise StateError("only a job under way can be saved", value=job.status)
    tensors: dict[str, torch.Tensor] = {}
    values, pixels = to_json(job.request)
    head = {
        "format": FORMAT,
        "card": job.model.card.digest,
        "adapters": job.model.binding.adapters,
        "weights": _replaced(job.model),
        "request": values,
        "pixels": {name: [frames.shape, frames.source] for name, frames in pixels.items()},
        "stage": job.stage,
        "index": job.index,
        "slots": _pack(job.slots, "slots", tensors),
        "leases": {name: _pack(_Leased.of(lease), f"leases/{name}", tensors) for name, lease in job.leases.items()},
        "state": None if job.state is None else _pack(job.state, "state", tensors),
    }
    # A tensor may be a view of a larger one or appear twice; each is on its own from here on.
    owned = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    return Snapshot(head, owned, pixels)


def save(job: Job, path: str | Path) -> None:
    """Write the job, atomically. Raises StateError if it has ended, OSError where it cannot be written."""
    snapshot(job).write(path)


def restore(
    model: Instance, path: str | Path, *, listener: Listener | None = None, observers: Sequence[Observer] = ()
) -> Job:
    """The job, ready to be submitted. Raises StateError if the file is damaged or belongs to another card."""
    try:
        with safe_open(path, framework="pt") as file:
            head = json.loads((file.metadata() or {})["job"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise StateError(f"{path} is not a saved job ({error})") from error
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        found = head.get("format") if isinstance(head, dict) else head
        raise StateError(f"{path} has another format", value=found, choices=(FORMAT,))
    if head.get("card") != model.card.digest:
        raise StateError(f"{path} belongs to another card", value=head.get("card"), choices=(model.card.digest,))
    if (ran := head.get("adapters", "")) != model.binding.adapters:
        raise StateError(f"{path} ran with other adapters", value=ran, choices=(model.binding.adapters or "none",))
    try:
        job = _continued(model, head, tensors, partial(Job, listener=listener, observers=observers))
    except CapacityError:
        raise  # it is a ValueError, too
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise StateError(f"{path} is damaged: it lacks what continues a job ({error!r})") from error
    _check_binding(job, path)
    _check_weights(job, head, path)
    return job


def _continued(
    model: Instance,
    head: Mapping[str, typing.Any],
    tensors: Mapping[str, torch.Tensor],
    make: Callable[[Instance, Request], Job],
) -> Job:
    pixels = {
        name: Frames(tensors[f"pixels/{name}"].numpy().tobytes(), tuple(shape), source)
        for name, (shape, source) in head["pixels"].items()
    }
    job = make(model, from_json(head["request"], pixels))
    job.stage, job.index = head["stage"], head["index"]
    device = model.binding.device
    # copies, because a file's tensors lie at odd addresses, and the last bits of small products depend on that
    moved = {name: t.to(device, copy=True) for name, t in tensors.items() if not name.startswith("pixels/")}
    job.slots = _unpack(head["slots"], dict[str, torch.Tensor], moved)
    for name, packed in head["leases"].items():
        job.leases[name] = _unpack(packed, _Leased, moved).on(model)
    if head["state"] is not None:
        job.state = _unpack(head["state"], job.stages[job.stage].loop.state_type, moved)
    if job.begun:
        job.take_up()
    return job


def _replaced(model: Instance) -> dict[str, str]:
    """Checksums of the components whose weights are not those of their files."""
    return {name: weights.checksum for name, weights in model.replaced().items()}


def _check_weights(job: Job, head: Mapping[str, object], path: str | Path) -> None:
    ran, ours = head["weights"], _replaced(job.model)
    if job.begun and ran != ours:
        raise StateError(
            f"{path} began with other weights than the model has now",
            value=ran,
            choices=(ours,),
            remedy="start it anew",
        )


def _check_binding(job: Job, path: str | Path) -> None:
    ours = job.env.binding
    bound = getattr(job.state, "binding", ours)
    if bound != ours:
        raise StateError(f"{path} was saved on another device or precision", value=f"{bound}", choices=(ours,))


def _pack(value: object, name: str, tensors: dict[str, torch.Tensor]) -> object:
    """JSON for `value`, its tensors put aside under names."""
    if isinstance(value, torch.Tensor):
        tensors[name] = value
        return {_TENSOR: name}
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _pack(getattr(value, f.name), f"{name}/{f.name}", tensors) for f in fields(value)}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _pack(item, f"{name}/{key}", tensors) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_pack(item, f"{name}/{i}", tensors) for i, item in enumerate(value)]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    raise TypeError(f"{name} of a loop's state is a {type(value).__name__}, which does not serialise")


def _unpack(value: typing.Any, kind: typing.Any, tensors: Mapping[str, torch.Tensor]) -> typing.Any:  # noqa: ANN401
    """The inverse of `_pack`, guided by the type annotations of the state."""
    if isinstance(value, dict) and set(value) == {_TENSOR}:
        return tensors[value[_TENSOR]]
    if is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        return kind(**{name: _unpack(item, hints[name], tensors) for name, item in value.items()})
    arguments = typing.get_args(kind)
    if isinstance(value, dict):
        return {key: _unpack(item, arguments[1] if arguments else object, tensors) for key, item in value.items()}
    if isinstance(value, list):
        inner = arguments[0] if arguments else object
        return tuple(_unpack(item, inner, tensors) for item in value)
    return value
