"""How a step's op is called: the one place that does. Eager here; captured graphs are another `Executor`.

    tensors = eager(model, Call(step, key, step.tensors, handles, 1))

Whoever drives jobs passes an executor on; the op is the same function in each.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ..caches.pool import Storage
from ..loop import Key, Step, Tensors
from .instance import Instance

Handles = Mapping[str, tuple[torch.Tensor, ...]]


@dataclass(slots=True, eq=False)  # not frozen: one is made for every step, and freezing doubles its price
class Call:
    """An op with everything it is called with: `tensors` has `rows` rows, of one request or of several.

    `storage` is what the step's leases lie in: whole pools, whose addresses stay, shared by all rows and written to.
    """

    step: Step
    key: Key
    tensors: Tensors
    handles: Handles
    rows: int
    storage: Mapping[str, Storage] = field(default_factory=dict)


class Executor(Protocol):
    """Runs a call on a model. The results are the caller's own."""

    def __call__(self, model: Instance, call: Call) -> Tensors: ...


def eager(model: Instance, call: Call) -> Tensors:
    """Call the op as it stands: the plain twin of every other way."""
    step = call.step
    with model.using(step.uses) as parts:
        if not torch.is_grad_enabled():  # entering `no_grad` takes a tenth of all that a step costs
            return step.op(parts, **call.tensors, **call.handles, **call.storage, **step.static)
        with torch.no_grad():
            return step.op(parts, **call.tensors, **call.handles, **call.storage, **step.static)
