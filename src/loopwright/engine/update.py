"""New weights for a component, while requests are served: when they are written, and who runs with which.

    instance = update(instance, "transformer", delivery, policy="drain", version=None, seconds=600)

- "drain": requests under way end with the weights they have, others wait; then the new ones are written over the old.
- "freeze": they are written between two steps, at once. Refused while a request is under way that does not follow.
- "finish": they are written to a copy beside the old ones, which those under way keep until they end. Nobody waits.

Whatever does not fit is refused before anything changes. Where nobody else has the component it is written in place, so
that captured graphs stay good; else, and under "finish", this instance gets a component of its own.
"""

import torch

from ..backends.precision import FLOAT8
from ..backends.usage import settle
from ..errors import BackendError, CardError, RequestError, StateError, WeightsError
from ..weights import sync
from .instance import Instance
from .residence import Resident, align
from .store import GIVEN

POLICIES = ("drain", "freeze", "finish")


def update(
    instance: Instance,
    name: str,
    delivery: sync.Delivery,
    *,
    policy: str = "drain",
    version: int | None = None,
    seconds: float = 600.0,
) -> Instance:
    """The instance that has the new weights: this one, or under "finish" its successor. Blocks; from any thread.

    `version` is the next one unless it is given, and then a larger one; `seconds` is how long "drain" may take.

    Raises WeightsError for what does not fit, RequestError, CardError, BackendError or CapacityError for what cannot be
    done, StateError where requests under way forbid it. In all these cases the component is as it was.
    """
    if policy not in POLICIES:
        raise RequestError("unknown policy for replacing weights", value=policy, choices=POLICIES)
    _check(instance, name, version)
    sync.bind(_module(instance.resident(name)), delivery)
    with instance.crew.closed():
        if instance.successor is not None:
            raise StateError("the weights of this instance have been replaced", remedy="update its successor")
        _check(instance, name, version)
        _check_merged(instance.resident(name), delivery)
        if policy == "finish":
            instance = _beside(instance, name, delivery, version)
        else:
            _make_way(instance, policy, seconds)
            _over(instance, name, delivery, version)
    return instance


def _check(instance: Instance, name: str, version: int | None) -> None:
    component = instance.card.components.get(name)
    if component is None or not component.dtype:
        weighted = [name for name, component in instance.card.components.items() if component.dtype]
        raise CardError(f"{instance.card.name} has no such component with weights", value=name, choices=weighted)
    if component.dtype == FLOAT8:
        raise BackendError(
            "weights in 8 bits were quantised as they were loaded, and cannot be replaced",
            value=name,
            remedy="load the model in bfloat16",
        )
    resident = instance.resident(name)
    if resident.identity[0] == GIVEN:
        raise StateError(f"{name} is a module of somebody else's", remedy="change its weights there, and tell of it")
    if version is not None and version <= resident.version:
        raise RequestError(f"a version must be larger than the present one, {resident.version}", value=version)


def _check_merged(resident: Resident, delivery: sync.Delivery) -> None:
    """Other layers than before: those that have an adapter in them would keep it."""
    left = sorted(resident.merged - delivery.tensors.keys())
    if delivery.form == "merged" and left:
        raise WeightsError(
            "weights into which an adapter was merged before would stay so", value=left[0], remedy="send all weights"
        )


def _make_way(instance: Instance, policy: str, seconds: float) -> None:
    """See to it that nobody under way will run with other weights unless he wants to."""
    if policy == "drain":
        instance.crew.wait(seconds)
        return
    members = instance.crew.members
    if staying := [member for member in members if not member.follows]:
        raise StateError(
            "requests are under way that must end with the weights they began with",
            value=f"{len(staying)} of them",
            remedy='use policy="drain" or "finish", or let requests follow',
        )
    for member in members:
        member.swapped()


def _over(instance: Instance, name: str, delivery: sync.Delivery, version: int | None) -> None:
    """Write over what is there, or, where others have that too, over a copy."""
    resident, store, device = instance.resident(name), instance.store, instance.binding.device
    if resident.owners > 1:
        instance.take(name, _copy(instance, name, delivery, version))
        return
    store.own(resident)
    with store.residence.alone(resident):
        settle(device)
        moved = not device.startswith("cuda") and not resident.low and align(_module(resident))
        _write(_module(resident), delivery)
        settle(device)
    resident.merged = _merged(resident, delivery)
    store.changed(resident, version=version, moved=moved)


def _beside(instance: Instance, name: str, delivery: sync.Delivery, version: int | None) -> Instance:
    successor = instance.succeeded(name, _copy(instance, name, delivery, version))
    instance.crew.dissolve(instance.retire)
    return successor


def _copy(instance: Instance, name: str, delivery: sync.Delivery, version: int | None) -> Resident:
    twin = instance.twin(name, lambda module: _write(module, delivery))
    settle(instance.binding.device)
    twin.merged = _merged(twin, delivery)
    instance.store.changed(twin, version=version)
    return twin


def _merged(resident: Resident, delivery: sync.Delivery) -> frozenset[str]:
    """Which weights have an adapter in them now."""
    return {"full": frozenset(), "merged": frozenset(delivery.tensors), "adapter": resident.merged}[delivery.form]


def _write(module: torch.nn.Module, delivery: sync.Delivery) -> None:
    sync.write(sync.bind(module, delivery))


def _module(resident: Resident) -> torch.nn.Module:
    assert isinstance(resident.part, torch.nn.Module), "the card gives it a precision"
    return resident.part
