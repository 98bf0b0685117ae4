"""What the encoders make of a data set, through the cache: encoded once, read ever after.

    encodings = Encodings(Cache("encoded"), "loopwright/tiny-wan", [Geometry(64, 64, 9)])
    encodings.sample(row)       # {"latent": [C, T, H, W], "cond": [L, D]}, in the precision they are stored in
    encodings.fill(rows)        # the same for all rows, ahead of training

The encoders are loaded at the first miss; who finds everything in the cache never loads them. Entries that are damaged
or not what their name says are told, and made anew.
"""

import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from .. import encoders
from ..backends.precision import torch_dtype
from ..card import Card, whole
from ..errors import DataError, ModelError
from .buckets import choose
from .cache import Cache, EntryError
from .decode import pixels
from .geometry import Geometry
from .keys import COND, LATENT, Key, Maker, makers, media_key, prompt_key
from .row import Row

if TYPE_CHECKING:
    from ..encoders.encoder import Encoder

OUTCOMES = FOUND, ENCODED, REDONE = ("found", "encoded", "redone")
Tell = Callable[[int, int], None]
Say = Callable[[str], None]


@dataclass(slots=True)
class Filled:
    """What filling a cache did.

    Attributes:
        files: each entry's file, with its kind and whether it was found, encoded or redone.
        problems: the rows that could not be encoded, in their order.
    """

    files: dict[Path, tuple[str, str]] = field(default_factory=dict)
    problems: list[DataError] = field(default_factory=list)

    def count(self) -> Counter[tuple[str, str]]:
        """How many entries of which kind were found, encoded or redone."""
        return Counter(self.files.values())


class Encodings:
    """The encodings of rows by the encoders of a checkpoint, which is always named, at the shapes `allowed`.

    Without shapes it is what the checkpoint itself makes if asked for nothing else. `revision` is a hub name's. `say`
    hears, in a line each, of entries that were not right. Several threads may ask at once; they encode one after
    another.

    Raises WeightsError or CardError for a checkpoint that is none, and RequestError for shapes that its encoders cannot
    take, before any weight is read.
    """

    def __init__(
        self,
        cache: Cache,
        checkpoint: str | Path,
        allowed: Sequence[Geometry] = (),
        *,
        revision: str | None = None,
        device: str = "auto",
        say: Say | None = None,
    ) -> None:
        self.cache, self.card = cache, encoders.find(checkpoint, revision=revision)
        self.allowed = tuple(allowed) or (_own(self.card),)
        for shape in self.allowed:
            encoders.validate_args(self.card, height=shape.height, width=shape.width, num_frames=shape.num_frames)
        self._device, self._say = device, say or (lambda line: None)
        self._makers: Mapping[str, Maker] = makers(self.card)
        self._loaded: Encoder | None = None
        self._encoding = threading.Lock()

    def keys(self, row: Row) -> Mapping[str, Key]:
        """The keys of a row's encodings, by kind. Raises DataError for a row that cannot be encoded."""
        if row.conditions:
            roles = ", ".join(condition.role for condition in row.conditions)
            raise DataError(row.where, "conditions have no encoder yet", value=roles, remedy="leave them out")
        return {
            LATENT: media_key(self._makers[LATENT], row, choose(row, self.allowed)),
            COND: prompt_key(self._makers[COND], row.prompt),
        }

    def sample(self, row: Row) -> dict[str, torch.Tensor]:
        """A row's latents [C, T, H, W] and embeddings [L, D]. Raises DataError for a row that cannot be encoded."""
        stored = {kind: self._get(key, row)[0] for kind, key in self.keys(row).items()}
        return {**stored, COND: self._padded(stored[COND])}

    def prompt(self, text: str) -> torch.Tensor:
        """The embeddings [L, D] of a text that need not be a row's, such as the empty one that dropped captions become.

        Zero past its last token. Raises DataError for embeddings that cannot be stored.
        """
        row = Row(text, Path(), "image", Path("prompt"), 0)
        return self._padded(self._get(prompt_key(self._makers[COND], text), row)[0])

    def fill(self, rows: Sequence[Row], tell: Tell = lambda done, total: None) -> Filled:
        """Encode what the cache lacks. Rows that cannot be encoded are problems, and hinder no other."""
        filled, problems = Filled(), dict[int, DataError]()
        # begun anywhere, so that processes that fill one cache at once seldom encode the same
        start = random.randrange(len(rows)) if rows else 0
        for done, index in enumerate((*range(start, len(rows)), *range(start))):
            tell(done, len(rows))
            try:
                self._fill(rows[index], filled.files)
            except DataError as error:
                problems[index] = error
        tell(len(rows), len(rows))
        filled.problems = [problems[index] for index in sorted(problems)]
        return filled

    def _fill(self, row: Row, files: dict[Path, tuple[str, str]]) -> None:
        """Each entry once, however many rows share it."""
        for kind, key in self.keys(row).items():
            path = self.cache.path(key)
            if path not in files:
                files[path] = kind, self._get(key, row)[1]

    def _get(self, key: Key, row: Row) -> tuple[torch.Tensor, str]:
        """The entry's tensor, and whether it was found, encoded or redone."""
        found, wrong = self._read(key)
        if found is not None:
            return found, FOUND
        with self._encoding:
            made, _ = self._read(key)  # another thread or process may have made it meanwhile
            if made is None:
                made = self._made(key, row)
                self.cache.write(key, made)
        if wrong:
            self._say(f"{wrong}; encoded anew")
        return made, REDONE if wrong else ENCODED

    def _read(self, key: Key) -> tuple[torch.Tensor | None, str]:
        try:
            return self.cache.read(key), ""
        except EntryError as error:
            return None, str(error)

    def _made(self, key: Key, row: Row) -> torch.Tensor:
        """Encode, in the precision to store. Raises DataError for what that cannot hold."""
        try:
            made = self._latent(key, row) if key.kind == LATENT else self._cond(row)
        except ModelError as error:
            raise DataError(row.where, str(error)) from error
        stored = self._makers[key.kind].output.stored
        rounded = made.to(torch_dtype(stored))
        if not rounded.isfinite().all():
            raise DataError(row.where, f"{key.kind} is beyond what {stored} holds", value=float(made.abs().max()))
        return rounded

    def _latent(self, key: Key, row: Row) -> torch.Tensor:
        generator = torch.Generator("cpu").manual_seed(key.seed)
        return encoders.encode_media(self._encoder(), pixels(row, choose(row, self.allowed)), generator)

    def _cond(self, row: Row) -> torch.Tensor:
        """Without the zeros past the prompt, which are most of it."""
        made = encoders.encode_prompt(self._encoder(), row.prompt)
        used = made.any(dim=1).nonzero()
        return made[: int(used.max()) + 1 if len(used) else 1]

    def _padded(self, cond: torch.Tensor) -> torch.Tensor:
        return functional.pad(cond, (0, 0, 0, self._makers[COND].output.tokens - cond.shape[0]))

    def _encoder(self) -> "Encoder":
        if self._loaded is None:
            self._loaded = encoders.load_encoder(self.card, self._device)
        return self._loaded


def _own(card: Card) -> Geometry:
    own = card.defaults[next(iter(card.programs))]
    return Geometry(whole(own, "height"), whole(own, "width"), whole(own, "num_frames"))
