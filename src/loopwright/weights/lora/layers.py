"""Adapters in a module, by peft: new ones to be trained, or those of files to be run.

    adapted = inject(transformer, rank=16, alpha=16, targets=("attn1.to_q", r"ffn\\.net\\..*"))
    matrices = tensors(transformer)

    check(outline, adapter)                      # shapes alone: a module without weights will do
    attach(transformer, [(adapter, 0.8)])

A target is a regular expression for the end of a module's name, from a dot on: "to_q" means every `to_q`, and
"attn1.to_[qkv]" those of self-attention.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from ...errors import WeightsError
from .adapter import Adapter
from .config import config_for
from .keys import PREFIX

if TYPE_CHECKING:
    from diffusers.loaders import PeftAdapterMixin
    from peft.tuners.lora import LoraLayer

_NAME = "default"  # of the adapter in training, as peft calls it
_ADAPTABLE = (torch.nn.Linear, torch.nn.Conv2d, torch.nn.Conv3d)


def inject(
    module: torch.nn.Module, *, rank: int, alpha: float, targets: Sequence[str], dropout: float = 0.0
) -> list[str]:
    """Give linear layers adapters to train, which change nothing yet; the names of these layers.

    The adapters' parameters are float32 whatever the module's precision, and the only ones that require gradients. A
    is drawn from torch's global generator.

    Raises WeightsError for a target that fits no linear layer, a rank below 1, or a module that has adapters already.
    """
    from peft import LoraConfig
    from peft.tuners.tuners_utils import cast_adapter_dtype

    if rank < 1:
        raise WeightsError("the rank of an adapter must be at least 1", value=rank)
    for name, _ in adapted(module):
        raise WeightsError("the module has adapters already", value=name, remedy="load it anew")
    names = _targeted(module, targets)
    module.requires_grad_(False)
    exactly = "|".join(map(re.escape, names))
    config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=exactly)  # type: ignore[arg-type]
    _mixin(module).add_adapter(config, _NAME)
    cast_adapter_dtype(module, _NAME)
    module.train(module.training)  # new layers are in training whatever the module is in, and drop out
    assert [name for name, _ in adapted(module)] == names, "peft adapts what it is told"
    return names


def tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A and B of every layer that `inject` adapted, as `save` takes them: on the host, detached, copies.

    Where parameters are sharded (FSDP2) they are gathered, so all ranks must call it.
    """
    from peft.utils import get_peft_model_state_dict
    from torch.distributed.tensor import DTensor

    named: Mapping[str, torch.Tensor] = get_peft_model_state_dict(module, adapter_name=_NAME)
    whole = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in named.items()}
    return {PREFIX["diffusers"] + name: tensor.detach().cpu().clone() for name, tensor in whole.items()}


def adapted(module: torch.nn.Module) -> "Iterator[tuple[str, LoraLayer]]":
    """The layers that have adapters, by name, in the module's order."""
    from peft.tuners.lora import LoraLayer

    return ((name, layer) for name, layer in module.named_modules() if isinstance(layer, LoraLayer))


def check(module: torch.nn.Module, adapter: Adapter) -> None:
    """Raise WeightsError where the adapter does not fit the module: a layer it lacks, or matrices of other sizes."""
    layers = _layers(module)
    for name, (down, up) in adapter.pairs.items():
        layer = layers.get(name)
        if layer is None:
            raise WeightsError(
                f"{adapter.file}: {type(module).__name__} has no such layer", value=name, choices=_patterns(layers)
            )
        (out, *inner), rank = layer.weight.shape, down.shape[0]
        expected = [rank, *inner], [out, rank, *[1] * (len(inner) - 1)]
        if (list(down.shape), list(up.shape)) != expected:
            raise WeightsError(
                f"{adapter.file}: the matrices of {name} do not fit a layer of {list(layer.weight.shape)}",
                value=f"{list(down.shape)} and {list(up.shape)}",
                choices=(f"{expected[0]} and {expected[1]}",),
                remedy="it was trained on another model",
            )


def attach(module: torch.nn.Module, adapters: Sequence[tuple[Adapter, float]]) -> None:
    """Run adapters from now on, each times its scale, unmerged and in the precision of the layers. All is frozen.

    Equal bit for bit to diffusers' `load_lora_weights` of the same files in its own layout. Raises as `check` does.
    """
    for adapter, _ in adapters:
        check(module, adapter)
    names = [f"adapter_{index}" for index in range(len(adapters))]
    for name, (adapter, _) in zip(names, adapters, strict=True):
        _load(module, adapter, name)
    _mixin(module).set_adapters(names, [scale for _, scale in adapters])
    module.requires_grad_(False)


@contextmanager
def switched_off(module: torch.nn.Module) -> Iterator[None]:
    """The module as if it had no adapters, for a `with` block. Which parameters take gradients stays as it is."""
    from peft.tuners.lora import LoraLayer

    layers = [layer for layer in module.modules() if isinstance(layer, LoraLayer)]
    before = [layer._disable_adapters for layer in layers]
    try:
        for layer in layers:
            layer._disable_adapters = True  # its public switch would also freeze the adapters
        yield
    finally:
        for layer, was in zip(layers, before, strict=True):
            layer._disable_adapters = was


def _load(module: torch.nn.Module, adapter: Adapter, name: str) -> None:
    """By diffusers; without drawing random numbers, and with copies of the matrices, which the module may change."""
    ranks = {layer: down.shape[0] for layer, (down, _) in adapter.pairs.items()}
    matrices = {key.removeprefix(PREFIX["diffusers"]): tensor.clone() for key, tensor in adapter.tensors.items()}
    config = config_for(ranks, adapter.alphas)
    options = {"prefix": None, "adapter_name": name, "metadata": config, "low_cpu_mem_usage": True}
    _mixin(module).load_lora_adapter(matrices, **options)


def _mixin(module: torch.nn.Module) -> "PeftAdapterMixin":
    from diffusers.loaders import PeftAdapterMixin

    if not isinstance(module, PeftAdapterMixin):
        raise WeightsError("adapters are for models of diffusers", value=type(module).__name__)
    return module


def _targeted(module: torch.nn.Module, targets: Sequence[str]) -> list[str]:
    """The linear layers that the targets fit, in the module's order."""
    layers = [name for name, layer in _layers(module).items() if isinstance(layer, torch.nn.Linear)]
    found: set[str] = set()
    for target in targets:
        try:
            fits = re.compile(rf"(?:.*\.)?(?:{target})")
        except re.error as error:
            raise WeightsError(f"a target is no regular expression ({error})", value=target) from error
        matched = [name for name in layers if fits.fullmatch(name)]
        if not matched:
            raise WeightsError("no linear layer has a name that ends so", value=target, choices=_patterns(layers))
        found.update(matched)
    if not found:
        raise WeightsError("no layers to adapt", choices=_patterns(layers), remedy="name targets")
    return [name for name in layers if name in found]


def _layers(module: torch.nn.Module) -> dict[str, torch.nn.Linear | torch.nn.Conv2d | torch.nn.Conv3d]:
    """What can be adapted, by name; of a layer that is adapted, the layer itself."""
    from peft.tuners.lora import LoraLayer

    found = {}
    for name, layer in module.named_modules():
        base = layer.get_base_layer() if isinstance(layer, LoraLayer) else layer
        if isinstance(base, _ADAPTABLE) and ".base_layer" not in name and ".lora_" not in name:
            found[name] = base
    return found


def _patterns(names: Iterable[str]) -> list[str]:
    """The distinct names, repeated blocks as one."""
    return list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name, count=1) for name in names))
