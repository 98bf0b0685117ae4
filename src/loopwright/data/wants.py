"""What has to be encoded for a row, as plain data: each encoding with its key and what it is made of.

    plan = Plan(card, [Geometry(480, 832, 81)], first_frame=True)
    plan.of(row)        # {"latent": Want, "cond": Want, "uncond": Want, "condition": Want, ...}

"uncond" is the empty prompt, which captions become when training drops them. A first frame is a condition of that role,
or with `first_frame` the first of the row's own frames. Reads sizes and content hashes of media, and no weights into
tensors.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .. import encoders
from ..card import Card
from ..encoders import COND, LATENT
from ..errors import DataError, RequestError
from .buckets import choose
from .geometry import Geometry
from .keys import Key, Maker, frame_key, maker, media_key, prompt_key
from .row import Row, Shown

UNCOND = "uncond"


@dataclass(frozen=True, slots=True)
class Want:
    """One encoding to have: of a `prompt`, or of media at a `shape`. `where` is the place that errors name."""

    key: Key
    where: str
    prompt: str = ""
    media: Shown | None = None
    shape: Geometry | None = None

    def dumps(self) -> str:
        """As JSON, for another process."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def loads(cls, text: str) -> "Want":
        """What `dumps` wrote."""
        given = json.loads(text)
        media, shape = given["media"], given["shape"]
        return cls(
            Key(**given["key"]),
            given["where"],
            given["prompt"],
            media and Shown(Path(media["path"]), media["kind"], media["where"]),
            shape and Geometry(**shape),
        )


class Plan:
    """What rows need of a card's encoders, at the shapes `allowed`.

    Raises RequestError where every row's first frame is asked for and the card makes nothing of one.
    """

    def __init__(self, card: Card, allowed: Sequence[Geometry], *, first_frame: bool) -> None:
        self._card, self._allowed, self._own = card, allowed, first_frame
        self._frame_kinds = encoders.of_first_frame(card)
        if first_frame and not self._frame_kinds:
            raise RequestError(
                f"{card.name} makes no videos of a first frame",
                remedy="leave the first frame out, or name the encoders of an image-to-video model",
            )
        kinds = (LATENT, COND, *(self._frame_kinds if first_frame else ()))
        self._makers: dict[str, Maker] = {kind: maker(card, kind) for kind in kinds}

    def of(self, row: Row) -> Mapping[str, Want]:
        """The encodings of a row, by name. Raises DataError for a row that cannot be encoded."""
        given = self._given(row)
        shape, seen = choose(row, self._allowed), Shown(row.path, row.kind, row.where)
        frame = given or (seen if self._takes_own(shape) else None)
        return {
            LATENT: Want(media_key(self._maker(LATENT), seen, shape), row.where, media=seen, shape=shape),
            COND: self.prompt(row.prompt, row.where),
            UNCOND: self.prompt("", row.where),
            **(self._of_frame(frame, shape) if frame else {}),
        }

    def prompt(self, text: str, where: str) -> Want:
        """The embeddings of a prompt."""
        return Want(prompt_key(self._maker(COND), text), where, prompt=text)

    def tokens(self) -> int:
        """How many rows the embeddings of every prompt have."""
        return self._maker(COND).output.tokens

    def _given(self, row: Row) -> Shown | None:
        """The first frame that the row's conditions name."""
        for problem in row.problems():
            raise problem
        if row.conditions and not self._frame_kinds:
            remedy = "leave the condition out, or name the encoders of an image-to-video model"
            raise DataError(row.where, f"{self._card.name} makes no videos of a first frame", remedy=remedy)
        return row.shown(row.conditions[0]) if row.conditions else None

    def _takes_own(self, shape: Geometry) -> bool:
        """Of one frame nothing would be left to learn; only a card that must have an image is given it even then."""
        must = all("image" in program.inputs for program in self._card.programs.values())
        return self._own and (shape.num_frames > 1 or must)

    def _of_frame(self, frame: Shown, shape: Geometry) -> dict[str, Want]:
        return {
            kind: Want(frame_key(kind, self._maker(kind), frame, shape), frame.where, media=frame, shape=shape)
            for kind in self._frame_kinds
        }

    def _maker(self, kind: str) -> Maker:
        if kind not in self._makers:
            self._makers[kind] = maker(self._card, kind)
        return self._makers[kind]
