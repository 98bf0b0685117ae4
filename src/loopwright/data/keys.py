"""The name of an encoding: a hash of everything that its content depends on, and of nothing else.

    key = media_key(maker, row, geometry)      # latents: of which encoder, of which media, in which shape
    key.name, key.seed                         # where it is kept; what its posterior is drawn with

Paths, times, the data set and the machine are not in it, so a cache can be moved, shared and merged. Latents do not
depend on the prompt, nor embeddings on the media, nor what a first frame becomes on the frames after it: each is stored
once for all rows that share it.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, replace

from ..card import Card
from ..encoders import COND, LATENT, Output, outputs
from ..encoders.identity import identity
from .geometry import Geometry
from .row import Media

SCHEMA = 1  # raise it when the same key would come to mean other values: other resizing, another layout of an entry


@dataclass(frozen=True, slots=True)
class Key:
    """`kind` is a name of `encoders.outputs`; `content` says in JSON, in one order, all that it depends on."""

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


def maker(card: Card, kind: str) -> Maker:
    """The maker of encodings of a kind. Reads every byte of its weights, once (`encoders.identity`)."""
    found = outputs(card)[kind]
    return Maker(card.family, found, identity(card, found.parts))


def media_key(maker: Maker, shown: Media, geometry: Geometry) -> Key:
    """The key of the latents of a row's media. Raises DataError for media that cannot be read."""
    return _key(LATENT, maker, media=shown.content, read_as=shown.kind, **asdict(geometry))


def frame_key(kind: str, maker: Maker, shown: Media, geometry: Geometry) -> Key:
    """The key of what the first frame of some media becomes. Raises DataError for media that cannot be read.

    A picture is the same whatever follows it; which frame of a video is the first depends on how many are taken.
    """
    if shown.kind == "image":
        frames = geometry.num_frames if maker.output.whole else 1
        geometry = replace(geometry, num_frames=frames, frame_stride=1)
    return _key(kind, maker, media=shown.content, read_as=shown.kind, **asdict(geometry))


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
