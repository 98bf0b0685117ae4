"""From a name to a card: the only list of what ships and what is known.

    card = find("loopwright/tiny-wan")          # or a folder, or a hub name such as "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"

A folder's card is its `card.json` if it has one, else it is made from its `model_index.json`. Hub names fetch the small
files only; weights come when a component is first used (`locate`).
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from .card import Card, Component, derive, load_card
from .errors import CardError, WeightsError
from .models import reward, wan
from .models.wan.card import read_json
from .program import Loops
from .weights import hub

if TYPE_CHECKING:
    from torch import Tensor, nn

Velocity = Callable[..., "Tensor"]
ZOO = Path(__file__).parent / "zoo"
SHIPPED = {"loopwright/tiny-wan": ZOO / "tiny-wan"}
FAMILIES = ("wan", "labels", "reward")
_PIPELINES = {pipeline: "wan" for pipeline in wan.PIPELINES}


class WholeClip(Protocol):
    """An autoencoder's passes over whole clips, for training; latents are not normalised."""

    def encode(self, video: "Tensor") -> tuple["Tensor", "Tensor"]:
        """[B, 3, T, H, W] in -1..1 -> means and log-variances [B, C, t, h, w]."""

    def decode(self, latents: "Tensor") -> "Tensor":
        """Latents -> video, not clamped."""


class Family(Protocol):
    """What a family's package offers."""

    def describe(self, folder: Path, name: str = "") -> Card: ...

    def loops(self, card: Card) -> Loops: ...

    def prepare(self, component: Component, part: object) -> None: ...

    def velocity(self, card: Card) -> Velocity: ...

    def bound(self, part: object, attention: str, kernels: str) -> AbstractContextManager[None]: ...

    def passes(self, autoencoder: "nn.Module", *, compile: bool = False) -> WholeClip: ...


def known() -> Iterator[Card]:
    """The cards that ship, then the published checkpoints known by name."""
    for name, folder in SHIPPED.items():
        yield _local(folder, name)
    yield from wan.KNOWN


def find(name: str, *, revision: str | None = None) -> Card:
    """The card of a shipped id, a folder or a hub name. Raises WeightsError or CardError, before weights are read."""
    if name in SHIPPED:
        return _local(SHIPPED[name], name)
    if hub.is_local(name):
        if revision:
            raise WeightsError("a local folder has no revisions", value=revision, remedy="leave the revision out")
        return _local(Path(name).expanduser())
    if name.startswith("loopwright/"):
        raise WeightsError("no model of that name ships with Loopwright", value=name, choices=SHIPPED)
    snapshot = hub.fetch(name, revision=revision, weights=False)
    card = _local(snapshot.folder, name)
    defaults = next((c.defaults for c in wan.KNOWN if c.name == name), {})
    components = {
        part: replace(c, source=name, revision=snapshot.commit) if c.source == "." else c
        for part, c in card.components.items()
    }
    return derive(card, components=components, defaults=defaults)


def loops(card: Card) -> Loops:
    """The loops of the card's family. Raises CardError for a family nobody here knows."""
    return _family(card).loops(card)


def preparation(card: Card) -> Callable[[Component, object], None]:
    """What the card's family does to a component just loaded. Raises CardError for a family nobody here knows."""
    return _family(card).prepare


def velocity(card: Card) -> Velocity:
    """The forward of the card's denoising step: (network, latents, timestep, text, ...) -> velocity.

    Raises CardError for a family nobody here knows.
    """
    return _family(card).velocity(card)


def binding(card: Card) -> Callable[[object, str, str], AbstractContextManager[None]]:
    """What holds a choice of attention and kernels for a component over several calls, such as a backward pass."""
    return _family(card).bound


def whole_clip(card: Card, autoencoder: "nn.Module", *, compile: bool = False) -> WholeClip:
    """The card's autoencoder over whole clips. Raises CardError for a layout that training does not know."""
    return _family(card).passes(autoencoder, compile=compile)


def _family(card: Card) -> Family:
    if card.family not in FAMILIES:
        raise CardError(f"card {card.name} is of an unknown family", value=card.family, choices=FAMILIES)
    family: Family = importlib.import_module(f".models.{card.family}", __package__)  # type: ignore[assignment]
    return family


def locate(card: Card, component: Component, *, weights: bool = True) -> Path:
    """The folder of a component's files, its subfolder left out; fetches them if they are on the hub.

    Without `weights` only its small files need be there.
    """
    source = component.source
    if source == ".":
        return Path(card.home)
    if source in SHIPPED:
        return SHIPPED[source]
    if hub.is_local(source):
        return (Path(card.home) / source).resolve() if source.startswith(".") else Path(source).expanduser()
    revision, subfolder = component.revision or None, component.subfolder
    part = hub.fetch(source, revision=revision, subfolder=subfolder, weights=weights).folder
    return part.parents[len(Path(component.subfolder).parts) - 1] if component.subfolder else part


def _local(folder: Path, name: str = "") -> Card:
    if not folder.is_dir():
        raise WeightsError(
            "no such folder",
            value=str(folder),
            choices=SHIPPED,
            remedy="give a Diffusers folder, a hub name (org/name) or a shipped id",
        )
    if (folder / "card.json").is_file():
        return load_card(folder / "card.json")
    if _is_scorer(folder):
        return reward.describe(folder, name)
    if not (folder / "model_index.json").is_file():
        raise WeightsError(
            f"{folder} holds neither card.json nor model_index.json",
            remedy="give the top folder of a Diffusers checkpoint",
        )
    pipeline = read_json(folder / "model_index.json").get("_class_name")
    family = _PIPELINES.get(str(pipeline))
    if family is None:
        raise CardError(
            f"{folder}: no family makes this pipeline",
            value=pipeline,
            choices=sorted(_PIPELINES),
            remedy="or put a card.json beside model_index.json",
        )
    module: Family = importlib.import_module(f".models.{family}", __package__)  # type: ignore[assignment]
    return module.describe(folder, name)


def _is_scorer(folder: Path) -> bool:
    """Whether transformers saved a model that scores there."""
    if not (folder / "config.json").is_file():
        return False
    named = read_json(folder / "config.json").get("architectures")
    return isinstance(named, list) and bool(set(named) & set(reward.ARCHITECTURES))
