"""What a run leaves: the trained networks as a folder that Loopwright and diffusers load, or adapters as safetensors.

    whole_model(plan, networks, group, output / "model")
    adapters(networks, group, output / "lora", run.lora)

The other components are the parent's: files beside its card are linked, or copied to another disk; what lies elsewhere,
as on the hub, is named by the card. A folder is written under another name and renamed.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from torch import nn

from .. import catalog
from ..backends.precision import torch_dtype
from ..card import Card, Component, Recipe, derive, dumps
from ..distributed.group import Group
from ..distributed.shard import whole
from .plan import Plan
from .run import Lora

_WEIGHTS = "diffusion_pytorch_model{suffix}.safetensors"
_BESIDE = ("model_index.json", "scheduler")  # what diffusers needs and a card does not name


def whole_model(plan: Plan, networks: Mapping[str, nn.Module], group: Group, folder: Path) -> None:
    """The model with its trained networks in it. A collective; the first process writes."""
    unfinished = folder.with_name(f".unfinished-{folder.name}")
    if group.first:
        shutil.rmtree(unfinished, ignore_errors=True)
        _others(plan, unfinished)
    for role, network in networks.items():
        tensors = gathered(network.state_dict(), group, torch_dtype(plan.run.stored))
        if group.first:
            component = plan.card.components[role]
            place = unfinished / component.subfolder
            place.mkdir(parents=True)
            source = catalog.locate(plan.card, component) / component.subfolder
            shutil.copy(source / "config.json", place)
            save_torch_state_dict(tensors, place, filename_pattern=_WEIGHTS)
    if group.first:
        (unfinished / "card.json").write_text(dumps(card_of(plan, folder.resolve())), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(unfinished, folder)
    group.wait()


def adapters(networks: Mapping[str, nn.Module], group: Group, folder: Path, settings: Lora) -> None:
    """The adapters of each network, `<network>.safetensors` in the layout that is asked for. A collective."""
    from ..weights import lora

    for role, network in networks.items():
        tensors = lora.tensors(network)
        if group.first:
            folder.mkdir(parents=True, exist_ok=True)
            alpha = settings.alpha or settings.rank
            lora.save(folder / f"{role}.safetensors", tensors, alpha=alpha, layout=settings.layout)
    group.wait()


def gathered(tensors: Mapping[str, torch.Tensor], group: Group, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All of each tensor, on the host of the first process; the others take part and keep nothing."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        complete = whole(tensor.detach())
        if group.first:
            # a copy of its own: what was gathered may be a part of a padded buffer
            found[name] = complete.to("cpu", dtype, copy=True, memory_format=torch.contiguous_format)
    return found


def card_of(plan: Plan, folder: Path) -> Card:
    """The card of what was trained: its parent's, with where the components are and how the weights were made."""
    parent = plan.card
    made = Recipe(plan.run.method, parent.recipe.assumes, parent.recipe.precision, parent.recipe.steps,
                  (f"{parent.name}@{parent.digest}",))  # fmt: skip
    components = {name: _placed(plan, name, component) for name, component in parent.components.items()}
    return derive(parent, name=f"{folder.parent.name}/{folder.name}", components=components, recipe=made)


def _placed(plan: Plan, name: str, component: Component) -> Component:
    if name in plan.roles:
        return replace(component, source=".", revision="")
    if component.source.startswith(".") and component.source != ".":
        return replace(component, source=str(catalog.locate(plan.card, component)))
    return component


def _others(plan: Plan, folder: Path) -> None:
    """Everything beside the parent's card but the networks trained."""
    home = Path(plan.card.home)
    trained = {plan.card.components[role].subfolder for role in plan.roles}
    named = {c.subfolder for c in plan.card.components.values() if c.source == "."}
    folder.mkdir(parents=True)
    for name in sorted((named | set(_BESIDE)) - trained):
        source = home / name
        if source.is_dir():
            shutil.copytree(source, folder / name, copy_function=_link)
        elif source.is_file():
            shutil.copy(source, folder / name)


def _link(source: str, target: str) -> None:
    """The same file under another name; a copy where the disk is another or knows no links."""
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copy2(source, target)
