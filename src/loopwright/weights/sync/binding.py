"""A delivery held against the module that is to have it: everything fits, or nothing is written.

    pairs = bind(module, delivery)         # raises for whatever does not fit; changes nothing
    write(pairs)

`bind` gives the module's own tensors, each with what it becomes. They are written where they lie: who keeps their
addresses, as captured graphs do, sees the new values.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch

from ...errors import WeightsError
from .. import lora
from .delivery import Delivery, plain
from .packing import config_of

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
_MASTERS = (torch.float32, torch.float64)
_OF_ITS_FILES = ("transformers_version", "torch_dtype", "dtype", "architectures")
_NAMED = 3  # of what does not fit


def bind(module: torch.nn.Module, delivery: Delivery) -> Pairs:
    """The module's tensors, each with its new values. Raises WeightsError unless all of the delivery fits."""
    _check_config(plain(config_of(module)), delivery.config)
    wanted = _adapter(module, delivery) if delivery.form == "adapter" else _weights(module, delivery)
    wrong = [text for name, target in wanted.items() if (text := _misfit(name, target, delivery))]
    if wrong:
        raise WeightsError(f"these weights do not fit {type(module).__name__}", value=_listed(wrong))
    if not wanted:
        raise WeightsError(f"none of the weights is one of {type(module).__name__}", value=_listed(delivery.tensors))
    return [(target, _ready(delivery.tensors[name], target)) for name, target in wanted.items()]


def write(pairs: Pairs) -> None:
    """Copy. Whoever interrupts it (as by Ctrl-C) finds all of it written: half would be neither version."""
    with torch.no_grad():
        try:
            _copy(pairs)
        except KeyboardInterrupt:
            _copy(pairs)
            raise


def _copy(pairs: Pairs) -> None:
    for target, source in pairs:
        target.copy_(source)


def _weights(module: torch.nn.Module, delivery: Delivery) -> dict[str, torch.Tensor]:
    """The module's tensors of these names: all of them, unless a part is what was packed."""
    own = module.state_dict()
    _same_names(module, own if delivery.form == "full" else own.keys() & delivery.tensors.keys(), delivery.tensors)
    return {name: own[name] for name in delivery.tensors}


def _adapter(module: torch.nn.Module, delivery: Delivery) -> dict[str, torch.Tensor]:
    """A and B of every adapted layer, by their names in an adapter's file."""
    own: dict[str, torch.Tensor] = {}
    for name, layer in lora.adapted(module):
        if len(layer.lora_A) != 1:
            raise WeightsError(
                "the module has several adapters, and nothing says whose these are", value=list(layer.lora_A)
            )
        ((given, alpha),) = layer.lora_alpha.items()
        if name in delivery.alphas and delivery.alphas[name] != alpha:
            raise WeightsError(f"the adapter of {name} has another alpha", value=delivery.alphas[name], choices=[alpha])
        own[lora.key(name, "down")] = layer.lora_A[given].get_parameter("weight").detach()
        own[lora.key(name, "up")] = layer.lora_B[given].get_parameter("weight").detach()
    if not own:
        raise WeightsError(
            f"{type(module).__name__} runs without adapters",
            remedy="load the model with one of the same layers and rank, or send the weights merged",
        )
    _same_names(module, own, delivery.tensors)
    return own


def _same_names(module: torch.nn.Module, own: Iterable[str], given: Iterable[str]) -> None:
    missing, unknown = sorted(set(own) - set(given)), sorted(set(given) - set(own))
    if missing:
        raise WeightsError(f"weights of {type(module).__name__} are missing", value=_listed(missing))
    if unknown:
        raise WeightsError(f"{type(module).__name__} has no such weights", value=_listed(unknown))


def _misfit(name: str, target: torch.Tensor, delivery: Delivery) -> str:
    given = delivery.tensors[name]
    if given.shape != target.shape:
        return f"{name} is {list(given.shape)} and must be {list(target.shape)}"
    floats = given.is_floating_point() and target.is_floating_point()
    if given.dtype == target.dtype or (floats and (delivery.stored or given.dtype in _MASTERS)):
        return ""
    return f"{name} is {given.dtype} and must be {target.dtype}"


def _ready(given: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Nothing is left to fail when it is copied: rounding on the way to another device takes memory there."""
    return given if given.device == target.device else given.to(target.dtype).contiguous()


def _check_config(own: Mapping[str, object], given: Mapping[str, object]) -> None:
    """Other heads or another epsilon change no shape, but everything that is computed."""
    for name in (name for name in own if name in given):  # in one order, so that errors name the same
        if not name.startswith("_") and name not in _OF_ITS_FILES and own[name] != given[name]:
            raise WeightsError(
                f"the weights are of a model with another {name}", value=given[name], choices=[own[name]]
            )


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f", and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
