"""Modules as deliveries: all of their weights, adapters merged into the layers they adapt, or the adapters alone.

    full(transformer)              # every weight
    merged(transformer)            # W + alpha / r x B A, of the layers that `lora.inject` adapted
    adapter(transformer)           # A and B of them

Sharded parameters (FSDP2) are gathered, so all processes must ask; what comes of it is on the module's device. Merging
is done in the precision of the layer, which is that of its forward.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from ...errors import WeightsError
from .. import lora
from .delivery import Delivery

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer


def full(module: torch.nn.Module) -> Delivery:
    """Every parameter and buffer of the module's `state_dict`, not copied where it need not be gathered."""
    tensors = {name: _whole(tensor.detach()) for name, tensor in module.state_dict().items()}
    return Delivery.of("full", tensors, config=config_of(module))


def merged(module: torch.nn.Module) -> Delivery:
    """The weights of the layers that are adapted, as without adapters they would have to be. Equal to peft's merging.

    Raises WeightsError where nothing is adapted, or a layer is not linear.
    """
    tensors = {f"{name}.weight": _merged(name, layer) for name, layer in lora.adapted(module)}
    return Delivery.of("merged", tensors, config=config_of(module))


def adapter(module: torch.nn.Module) -> Delivery:
    """A and B of every adapted layer, on the host. Raises WeightsError where nothing is adapted."""
    alphas = {name: float(_only(layer.lora_alpha)) for name, layer in lora.adapted(module)}
    return Delivery.of("adapter", lora.tensors(module) if alphas else {}, alphas=alphas, config=config_of(module))


def pack(module: torch.nn.Module, receiver: object) -> Delivery:
    """What the receiver needs of a module: its adapters if both have some, merged if it has none, else everything."""
    if not _has_adapters(module):
        return full(module)
    return adapter(module) if _has_adapters(receiver) else merged(module)


def _has_adapters(part: object) -> bool:
    return isinstance(part, torch.nn.Module) and any(True for _ in lora.adapted(part))


def config_of(module: torch.nn.Module) -> dict[str, object]:
    """What a model of diffusers or transformers was built by; empty for others."""
    config = getattr(module, "config", {})
    to_dict: Callable[[], Mapping[str, object]] | None = getattr(config, "to_dict", None)
    return dict(config if to_dict is None else to_dict())


def _merged(name: str, layer: "LoraLayer") -> torch.Tensor:
    base = layer.get_base_layer()
    if not isinstance(base, torch.nn.Linear):
        raise WeightsError("adapters are merged into linear layers alone", value=f"{name}: {type(base).__name__}")
    weight = _whole(base.weight.detach())
    for down, up, scaling in _matrices(layer):
        weight = weight + (up.to(weight.dtype) @ down.to(weight.dtype)) * scaling
    return weight


def _matrices(layer: "LoraLayer") -> Iterator[tuple[torch.Tensor, torch.Tensor, float]]:
    for name in layer.active_adapters:
        down, up = layer.lora_A[name].get_parameter("weight"), layer.lora_B[name].get_parameter("weight")
        yield _whole(down.detach()), _whole(up.detach()), layer.scaling[name]


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, sharded or not. Sharding takes a second to import, so who serves does without."""
    if type(tensor) is torch.Tensor:
        return tensor
    from ...distributed.shard import whole

    return whole(tensor)


def _only(alphas: Mapping[str, float]) -> float:
    (alpha,) = alphas.values()
    return alpha
