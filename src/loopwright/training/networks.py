"""The networks of a run: loaded as serving loads them, made trainable, sharded.

    networks = load(card, roles, run, group)        # {"transformer": ...}, by their names on the card

Whole networks are loaded in float32, which is what is trained; under adapters the weights below them are as served, and
the adapters float32. The family's hook is applied, so that the forward is the very one that serving runs.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from .. import catalog
from ..api.model import denoising
from ..backends.compile import compile_blocks
from ..backends.precision import torch_dtype
from ..card import Card, derive
from ..distributed.group import Group
from ..distributed.shard import shard
from ..loops.denoise import SOLVERS
from ..weights.load import load_component

if TYPE_CHECKING:
    from .run import Lora, Run


def load(card: Card, roles: tuple[str, ...], run: "Run", group: Group) -> dict[str, nn.Module]:
    """The networks of these roles, ready to train. Raises WeightsError or CardError."""
    return {role: _loaded(card, role, run, group) for role in roles}


def _loaded(card: Card, role: str, run: "Run", group: Group) -> nn.Module:
    component = replace(card.components[role], dtype="float32" if run.lora is None else run.precision)
    # whole weights go straight to the device; of several processes that share them each moves its shards there
    place = "cpu" if group.ranks > 1 and sharded(run, group) else str(group.device)
    network = load_component(component, catalog.locate(card, component), place)
    assert isinstance(network, nn.Module)
    catalog.preparation(card)(component, network)
    if run.lora is None:
        network.requires_grad_(True)
    else:
        adapt(network, run.lora, run.seed)
    if run.gradient_checkpointing:
        network.enable_gradient_checkpointing()  # type: ignore[operator]
    network.train()
    if run.compile and run.method != "autoencoder":
        compile_blocks(network)
    if sharded(run, group):
        shard(network, group.mesh, run.precision)
    return network


def copied(card: Card, role: str, run: "Run", device: str) -> nn.Module:
    """The network as it is served, whole and frozen, with adapters if the run has some; their values are not told."""
    component = replace(card.components[role], dtype=run.precision)
    network = load_component(component, catalog.locate(card, component), device)
    assert isinstance(network, nn.Module)
    catalog.preparation(card)(component, network)
    if run.lora is not None:
        adapt(network, run.lora, run.seed)
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(torch_dtype(run.precision))
    return network.requires_grad_(False).eval()


def sharded(run: "Run", group: Group) -> bool:
    """Whether weights are sharded, and lowered as shards are gathered; else who computes lowers them, by autocast.

    A process alone that compiles has nothing to gather, and hooks between layers would cut what is compiled. The passes
    of an autoencoder use its weights where they are.
    """
    alone = run.compile and group.ranks == 1
    return run.parallel == "shard" and run.method != "autoencoder" and not alone


def adapt(network: nn.Module, settings: "Lora", seed: int) -> list[str]:
    """Add adapters, alike in every process; the layers that have one. Raises RequestError for a pattern of none."""
    from ..weights import lora

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return lora.inject(
            network,
            rank=settings.rank,
            alpha=settings.alpha or settings.rank,
            targets=settings.targets,
            dropout=settings.dropout,
        )


def served(card: Card, sampler: str | None) -> Card:
    """The card under that sampler, or its own."""
    return card if sampler is None else derive(card, loops={denoising(card): SOLVERS[sampler].semantics})


def outline(card: Card, role: str) -> nn.Module:
    """A network's shapes without its weights, for checks before any weight is read."""
    component = replace(card.components[role], dtype="float32")
    network = load_component(component, catalog.locate(card, component), "meta")
    assert isinstance(network, nn.Module)
    return network


def count(networks: Mapping[str, nn.Module]) -> tuple[int, int]:
    """How many parameters there are, and how many of them are trained."""
    all_of_them = [parameter for network in networks.values() for parameter in network.parameters()]
    return sum(p.numel() for p in all_of_them), sum(p.numel() for p in all_of_them if p.requires_grad)
