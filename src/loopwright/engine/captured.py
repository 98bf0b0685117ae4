"""One captured step: its own input tensors, and the recording that reads them.

    with model.hold(step.uses): ...
    step = Captured(capture, call, run)       # `run` is called on a call with these inputs, and recorded
    tensors = step.replay(call)               # the caller's own; nothing of the graph leaves it

What a call brings is copied in. Conditioning, which stays the same from step to step, is copied when another tensor
than last time is lent, or when it has been written to. Pools stay where they are and the graph writes to them there.
Nothing is cast: what a graph was not captured for is an error.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import torch

from ..backends.capture import Capture
from ..errors import BackendError
from ..loop import Tensors
from .execute import Call, Handles
from .residence import size_of


class Captured:
    """`run` makes a call's results as the graph will. Raises whatever forbids recording it."""

    def __init__(self, capture: Capture, call: Call, run: Callable[[Call], Tensors]) -> None:
        self._capture = capture
        self._tensors = {name: tensor.clone() for name, tensor in call.tensors.items()}
        self._handles = {name: tuple(map(torch.clone, lent)) for name, lent in call.handles.items()}
        self._lent = {name: tuple(map(_Lent, lent)) for name, lent in call.handles.items()}
        self._storage = call.storage
        own = replace(call, tensors=self._tensors, handles=self._handles)
        self._recording = capture.record(lambda: run(own))

    @property
    def bytes(self) -> int:
        """Of the input tensors."""
        return sum(map(size_of, _all(self._tensors, self._handles)))

    def replay(self, call: Call) -> Tensors:
        """The call's results. Raises BackendError for tensors that differ from the captured ones in more than value."""
        _same_names(self._tensors, call.tensors)
        _same_names(self._handles, call.handles)
        for name, pool in call.storage.items():
            if pool is not self._storage.get(name):
                raise _mismatch(name, "another pool", "a pool")
        if not torch.is_grad_enabled():
            return self._replayed(call)
        with torch.no_grad():
            return self._replayed(call)

    def _replayed(self, call: Call) -> Tensors:
        self._capture.follow()
        for name, tensor in call.tensors.items():
            _fill(name, self._tensors[name], tensor)
        for name, lent in call.handles.items():
            self._lend(name, lent)
        self._recording.replay()
        return {name: tensor.clone() for name, tensor in self._recording.outputs.items()}

    def _lend(self, name: str, lent: tuple[torch.Tensor, ...]) -> None:
        known = self._lent[name]
        if len(known) != len(lent):
            raise _mismatch(name, f"{len(lent)} tensors", f"{len(known)} tensors")
        if all(map(_Lent.is_still, known, lent)):
            return
        self._lent[name] = ()  # until all of it is copied
        for buffer, tensor in zip(self._handles[name], lent, strict=True):
            _fill(name, buffer, tensor)
        self._lent[name] = tuple(map(_Lent, lent))


class _Lent:
    """Which tensor was copied, and as of when. Keeps no tensor alive."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self._version = None if tensor.is_inference() else tensor._version

    def is_still(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is that one, unchanged. Inference tensors do not say whether they are."""
        return self._version is not None and self._tensor() is tensor and tensor._version == self._version


def _fill(name: str, buffer: torch.Tensor, tensor: torch.Tensor) -> None:
    if tensor.shape != buffer.shape or tensor.dtype != buffer.dtype or tensor.device != buffer.device:
        raise _mismatch(name, _told(tensor), _told(buffer))
    buffer.copy_(tensor)


def _same_names(captured: Mapping[str, object], given: Mapping[str, object]) -> None:
    if captured.keys() != given.keys():
        raise _mismatch("tensors", ", ".join(given), ", ".join(captured))


def _mismatch(name: str, given: str, captured: str) -> BackendError:
    return BackendError(f"a captured step takes {name} as it was captured with it ({captured})", value=given)


def _told(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"


def _all(tensors: Tensors, handles: Handles) -> Iterator[torch.Tensor]:
    yield from tensors.values()
    lent: Iterable[tuple[torch.Tensor, ...]] = handles.values()
    for some in lent:
        yield from some
