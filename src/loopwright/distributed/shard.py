"""A network's weights as shards over a group's processes, in float32, computed in a lower precision (FSDP2).

    shard(network, mesh, "bfloat16")        # in place; then call it as before
    whole(parameter)                        # all of a sharded tensor, in every process

The masters stay as loaded. What a layer computes with is a copy in the compute precision, except where diffusers keeps
a part in float32 when it loads in a lower one (`_keep_in_fp32_modules`): those are float32 here too, so that training
computes what serving computes, bit for bit. That is why the units of sharding are not whole blocks: the largest parts
with no such weight are units in the lower precision, and a block holds what is left.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

_AS_STORED = MixedPrecisionPolicy(cast_forward_inputs=False)


def shard(network: nn.Module, mesh: DeviceMesh, compute: str) -> None:
    """Shard in place. `compute` is "float32" or "bfloat16"; gradients are summed in float32 either way."""
    if compute != "float32":
        dtype: torch.dtype = getattr(torch, compute)
        for part in list(_lowered(network, "", _kept(network))):
            # A leaf's one input is cast; a larger part also takes rotary tables, which are float32 when serving too.
            leaf = not any(True for _ in part.children())
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=leaf)
            fully_shard(part, mesh=mesh, mp_policy=policy)
    names = set(getattr(network, "_no_split_modules", None) or ())
    for block in [part for part in network.modules() if type(part).__name__ in names]:
        fully_shard(block, mesh=mesh, mp_policy=_AS_STORED)
    # what the network itself holds would otherwise stay gathered after a forward, and miss weights that change places
    fully_shard(network, mesh=mesh, mp_policy=_AS_STORED, reshard_after_forward=True)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor. A collective where it is sharded: every process must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's own part of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def trained(networks: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    """The parameters that take gradients, by "network.name", in one order on every process."""
    return {
        f"{role}.{name}": parameter
        for role, network in networks.items()
        for name, parameter in network.named_parameters()
        if parameter.requires_grad
    }


def _kept(network: nn.Module) -> frozenset[str]:
    """Names of the parts that stay in float32."""
    return frozenset(getattr(network, "_keep_in_fp32_modules", None) or ())


def _lowered(part: nn.Module, path: str, kept: frozenset[str]) -> Iterator[nn.Module]:
    """The largest parts all of whose weights are to be computed with in the lower precision."""
    for name, child in part.named_children():
        below = f"{path}{name}."
        high = [bool(kept.intersection(f"{below}{leaf}".split("."))) for leaf, _ in child.named_parameters()]
        # a list of layers is no part that is ever called
        if high and not any(high) and not isinstance(child, nn.ModuleList):
            yield child
        elif not all(high):
            yield from _lowered(child, below, kept)
