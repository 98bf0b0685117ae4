"""The name of an encoding: a hash of everything that its content depends on, and of nothing else.

    key = media_key(maker, row, geometry)      # latents: of which encoder, of which media, in which shape
    key.name, key.seed                         # where it is kept; what its posterior is drawn with

Paths, times, the data set and the machine are not in it, so a cache can be moved, shared and merged. Latents do not
depend on the prompt, nor embeddings on the media: each is stored once for all rows that share it.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from ..card import Card
from ..encoders import Output, outputs
from ..encoders.identity import identity
from .geometry import Geometry
from .row import Row

SCHEMA = 1  # raise it when the same key would come to mean other values: other resizing, another layout of an entry
LATENT, COND = "latent", "cond"


@dataclass(frozen=True, slots=True)
class Key:
    """`kind` is "latent" or "cond"; `content` says in JSON, in one order, all that the encoding depends on."""

    kind: str
    content: str

    @property
    def name(self) -> str:
        """A hash of it, 40 hexadecimal digits."""
        return hashlib.sha256(f"{self.kind} {self.content}".encode()).hexdigest()[:40]

    @property
    def seed(self) -> int:
        """What the encoding's noise is drawn with: the same whoever encodes it, and in whichever order."""
        return int(self.name[:15], 16)


@dataclass(frozen=True, slots=True)
class Maker:
    """What makes encodings of one kind: encoders of a family, told by content, in a precision."""

    family: str
    output: Output
    identity: str


def makers(card: Card) -> Mapping[str, Maker]:
    """The makers of latents and embeddings, by kind. Reads every byte of the weights, once (`encoders.identity`)."""
    found = outputs(card)
    return {kind: Maker(card.family, found[kind], identity(card, found[kind].parts)) for kind in (LATENT, COND)}


def media_key(maker: Maker, row: Row, geometry: Geometry) -> Key:
    """The key of the latents of a row's media. Raises DataError for media that cannot be read."""
    return _key(LATENT, maker, media=row.content, read_as=row.kind, **asdict(geometry))


def prompt_key(maker: Maker, prompt: str) -> Key:
    """The key of a prompt's embeddings."""
    return _key(COND, maker, prompt=prompt, tokens=maker.output.tokens)


def _key(kind: str, maker: Maker, **content: str | int) -> Key:
    made = {
        "schema": SCHEMA,
        "family": maker.family,
        "encoder": maker.identity,
        "compute": maker.output.compute,
        "stored": maker.output.stored,
    }
    return Key(kind, json.dumps({**made, **content}, sort_keys=True, ensure_ascii=False))
