"""Frozen encoders by family: one media file and its prompt become what a generator is trained on.

    card = encoders.find("loopwright/tiny-wan")          # always named, never guessed from the model being trained
    encoders.validate_args(card, height=64, width=64, num_frames=9)
    encoder = encoders.load_encoder(card, "cpu")
    sample = encoders.encode_sample(encoder, pixels, "a fox moving left", torch.Generator().manual_seed(7))

They call the very ops that serving runs, so training sees what serving computes. A family is a module of this package
with the functions of `Family`; the card says which. Importing this package imports no torch. Deliberately absent:
storage, which is `data.cache`'s, any choice of a checkpoint, and any geometry but the pixels' own.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from .. import catalog
from ..card import Card
from ..errors import CardError, RequestError

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from ..media import Pixels
    from .encoder import Encoder

FAMILIES = ("wan",)
SAMPLE = LATENT, COND = ("latent", "cond")  # what every row has


@dataclass(frozen=True, slots=True)
class Output:
    """One of the tensors of a sample, as far as it can be known before any weight is read.

    Attributes:
        parts: the components that compute it, by their names on the card.
        compute: the precision they run in, as served.
        stored: the precision to keep it in.
        tokens: how many rows it has where its length is the prompt's; 0 where its shape is the media's.
        whole: of what a first frame becomes, whether it is as long as the video.
    """

    parts: tuple[str, ...]
    compute: str
    stored: str
    tokens: int = 0
    whole: bool = False


class Family(Protocol):
    """What a family's module offers. Tensors are float32, on the host, without a batch dimension."""

    def outputs(self, card: Card) -> Mapping[str, Output]:
        """What the encoders make, by name: "latent", "cond", and what a first frame becomes, as the forward has it."""

    def validate_args(self, card: Card, *, height: int, width: int, num_frames: int) -> None:
        """Raise RequestError where the encoders cannot take media of this size, in pixels and frames."""

    def load_encoder(self, card: Card, device: str) -> "Encoder":
        """The frozen encoders on that device, in the card's precision."""

    def encode_media(self, encoder: "Encoder", pixels: "Tensor", generator: "Generator") -> "Tensor":
        """Pixels [3, T, H, W] in -1..1 -> one draw of their latents [C, T', H', W'], normalised."""

    def encode_prompt(self, encoder: "Encoder", prompt: str) -> "Tensor":
        """A prompt -> its embeddings [L, D], zero past its last token."""

    def encode_first_frame(self, encoder: "Encoder", name: str, picture: "Pixels", num_frames: int) -> "Tensor":
        """A picture [H, W, 3] -> the output of that name for a video of so many frames that begins with it."""


def find(checkpoint: str | Path, *, revision: str | None = None) -> Card:
    """The card of an encoder checkpoint: a folder, a hub name or a shipped id. Reads no weights.

    Raises WeightsError for what is no checkpoint, CardError for a family without encoders or a precision left open.
    """
    if not str(checkpoint):
        raise RequestError("no encoder checkpoint", remedy="name a Diffusers folder, a hub name or a shipped id")
    card = catalog.find(str(checkpoint), revision=revision)
    for output in outputs(card).values():
        if output.compute == "auto":
            raise CardError(
                f"card {card.name}: {output.parts[-1]} must have a precision that is the same on every machine",
                value="auto",
                choices=("float32", "bfloat16"),
                remedy="state it on the card",
            )
    return card


def outputs(card: Card) -> Mapping[str, Output]:
    """What the card's encoders make, by name.

    "latent", "cond", and where the card makes videos of pictures what a first frame becomes, by the names that the
    generator's forward has for it.
    """
    return _family(card).outputs(card)


def of_first_frame(card: Card) -> tuple[str, ...]:
    """The names of what a first frame becomes; none where the card makes no videos of pictures."""
    return tuple(name for name in outputs(card) if name not in SAMPLE)


def validate_args(card: Card, *, height: int, width: int, num_frames: int) -> None:
    """Raise RequestError, with the nearest values that would do, where the encoders cannot take such media."""
    _family(card).validate_args(card, height=height, width=width, num_frames=num_frames)


def load_encoder(card: Card, device: str = "auto") -> "Encoder":
    """The frozen encoders of a card that `find` gave; the generator is neither fetched nor read."""
    return _family(card).load_encoder(card, device)


def encode_media(encoder: "Encoder", pixels: "Tensor", generator: "Generator") -> "Tensor":
    """Pixels [3, T, H, W] in -1..1 -> one draw of their latents, float32 [C, T', H', W'], normalised per channel.

    `generator` is a seeded one of the CPU: the draw is the same on every device. Raises RequestError for other pixels.
    """
    return _family(encoder.card).encode_media(encoder, pixels, generator)


def encode_prompt(encoder: "Encoder", prompt: str) -> "Tensor":
    """A prompt -> its embeddings, float32 [L, D], zero past its last token; cleaned and cut as serving does."""
    return _family(encoder.card).encode_prompt(encoder, prompt)


def encode_first_frame(encoder: "Encoder", name: str, picture: "Pixels", num_frames: int) -> "Tensor":
    """What a video's first frame becomes: the output `name` of `of_first_frame`, float32, as serving computes it.

    `picture` is uint8 [H, W, 3], of the size that the video has. Raises RequestError for a size it cannot have.
    """
    return _family(encoder.card).encode_first_frame(encoder, name, picture, num_frames)


def encode_sample(encoder: "Encoder", pixels: "Tensor", prompt: str, generator: "Generator") -> dict[str, "Tensor"]:
    """Both, as "latent" and "cond", on the host and not yet rounded to the precision they are stored in."""
    return {LATENT: encode_media(encoder, pixels, generator), COND: encode_prompt(encoder, prompt)}


def _family(card: Card) -> Family:
    if card.family not in FAMILIES:
        raise CardError(f"card {card.name}: no encoders for its family", value=card.family, choices=FAMILIES)
    family: Family = importlib.import_module(f".{card.family}", __package__)  # type: ignore[assignment]
    return family
