"""What the encoders make of a data set, through the cache: encoded once, read ever after.

    with Encodings(Cache("encoded"), "loopwright/tiny-wan", [Geometry(64, 64, 9)], workers=4) as encodings:
        encodings.fill(rows)        # all rows ahead of training; who shares an encoding has it made once
        encodings.sample(row)       # {"latent": [C, T, H, W], "cond": [L, D]}, in the precision they are stored in
        encodings.prompt("")        # [L, D], what dropped captions become

A row with a first frame also has what the generator's forward takes of one: `condition` [4 + C, T, H, W] and perhaps
`image_embeds` [257, D], or `first_frame` [C, 1, H, W]. The encoders are loaded at the first miss; who finds everything
in the cache loads none and starts nothing. Entries that are damaged or not what their name says are told and made anew.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import torch
from torch.nn import functional

from .. import encoders
from ..card import Card, whole
from ..encoders import COND
from ..errors import DataError
from .cache import Cache, CacheError, EntryError
from .filling import Filled, Filling, Say, Tell
from .geometry import Geometry
from .keys import Key
from .pool import pool_of, slots
from .row import Row
from .wants import UNCOND, Plan, Want


class Encodings:
    """The encodings of rows by the encoders of a checkpoint, which is always named, at the shapes `allowed`.

    Without shapes it is what the checkpoint itself makes if asked for nothing else. `revision` is a hub name's. With
    `first_frame` each row that names none is given its own, as training image-to-video does; a still is not, unless
    the card must have an image. `device`, `workers`, `dedicated` and `park` are `pool`'s. `say` hears, in a line each,
    of entries that were not right. Several threads may ask at once.

    Raises WeightsError or CardError for a checkpoint that is none, and RequestError for a device that is not here and
    for shapes or a first frame that its encoders cannot take, before any weight is read.
    """

    def __init__(
        self,
        cache: Cache,
        checkpoint: str | Path,
        allowed: Sequence[Geometry] = (),
        *,
        revision: str | None = None,
        first_frame: bool = False,
        device: str = "auto",
        workers: int = 1,
        dedicated: bool = False,
        park: bool = False,
        say: Say = lambda line: None,
    ) -> None:
        self.cache, self.card = cache, encoders.find(checkpoint, revision=revision)
        self.allowed = tuple(allowed) or (_own(self.card),)
        for shape in self.allowed:
            encoders.validate_args(self.card, height=shape.height, width=shape.width, num_frames=shape.num_frames)
        self._say = say
        self._pool = pool_of(self.card, cache, slots(device, workers, dedicated=dedicated), park=park)
        self._plan = Plan(self.card, self.allowed, first_frame=first_frame)

    def __enter__(self) -> "Encodings":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the workers that were started. Whatever is missed later starts them anew."""
        self._pool.close()

    def keys(self, row: Row) -> Mapping[str, Key]:
        """The keys of a row's encodings, by name. Raises DataError for a row that cannot be encoded."""
        return {name: want.key for name, want in self._plan.of(row).items()}

    def files(self, rows: Iterable[Row]) -> set[Path]:
        """Where the encodings of rows lie, or would. Raises DataError for a row that cannot be encoded."""
        return {self.cache.path(key) for row in rows for key in self.keys(row).values()}

    def sample(self, row: Row) -> dict[str, torch.Tensor]:
        """A row's latents [C, T, H, W], embeddings [L, D], and what its first frame becomes.

        Raises DataError for a row that cannot be encoded.
        """
        wants = {name: want for name, want in self._plan.of(row).items() if name != UNCOND}
        stored = {name: self._obtained(want) for name, want in wants.items()}
        return {**stored, COND: self._padded(stored[COND])}

    def prompt(self, text: str) -> torch.Tensor:
        """The embeddings [L, D] of a text that need not be a row's, such as the empty one that dropped captions become.

        Zero past its last token. Raises DataError for embeddings that cannot be stored.
        """
        return self._padded(self._obtained(self._plan.prompt(text, f"the prompt {text!r}")))

    def fill(self, rows: Sequence[Row], tell: Tell = lambda done, total: None) -> Filled:
        """Encode what the cache lacks of the rows. Those that cannot be encoded are problems, and hinder no other."""
        return Filling(rows, self._plan.of, self.cache, self._say, tell).by(self._pool)

    def _obtained(self, want: Want) -> torch.Tensor:
        found = self._read(want)
        if found is None:
            ((_, problem),) = self._pool.make([want])
            if problem:
                raise DataError(want.where, problem)
            found = self.cache.read(want.key)
            if found is None:
                raise CacheError(f"{self.cache.path(want.key)} was removed while it was needed", remedy="prune later")
        return found

    def _read(self, want: Want) -> torch.Tensor | None:
        try:
            return self.cache.read(want.key)
        except EntryError as error:
            self._say(f"{error}; encoded anew")
            return None

    def _padded(self, cond: torch.Tensor) -> torch.Tensor:
        return functional.pad(cond, (0, 0, 0, self._plan.tokens() - cond.shape[0]))


def _own(card: Card) -> Geometry:
    own = card.defaults[next(iter(card.programs))]
    return Geometry(whole(own, "height"), whole(own, "width"), whole(own, "num_frames"))
