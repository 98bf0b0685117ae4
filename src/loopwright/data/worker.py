"""Encodes wants into a cache, one at a time, with encoders that are loaded for the first of them.

    worker = Worker(card, Cache("encoded"), "cuda:0")
    worker.make(want)       # "" once the entry is there, else what is wrong with the row
    worker.park()           # the encoders go to host memory, and come back for the next want

Deliberately absent: other processes, which are `fleet`'s; `pool` chooses.
"""

import torch

from .. import encoders
from ..backends.precision import torch_dtype
from ..card import Card
from ..encoders import COND, LATENT
from ..encoders.encoder import Encoder
from ..errors import DataError, ModelError
from .cache import Cache, EntryError
from .decode import first_frame, pixels
from .wants import Want


class Worker:
    """One process's encoders. Not to be used by two threads at once."""

    def __init__(self, card: Card, cache: Cache, device: str) -> None:
        self._card, self._cache, self._device = card, cache, device
        self._loaded: Encoder | None = None

    def make(self, want: Want) -> str:
        """Have the entry in the cache; what is wrong with the row if that cannot be, else "".

        An entry that another thread or process has made meanwhile is left as it is.
        """
        try:
            if not self._has(want):
                self._cache.write(want.key, self._rounded(want))
        except DataError as error:
            return error.problem
        return ""

    def park(self) -> None:
        """Move the encoders to host memory until the next want."""
        if self._loaded is not None:
            self._loaded.park()

    def _has(self, want: Want) -> bool:
        try:
            return self._cache.read(want.key) is not None
        except EntryError:
            return False

    def _rounded(self, want: Want) -> torch.Tensor:
        """Encode, in the precision to store. Raises DataError for what that cannot hold."""
        try:
            made = self._encoded(want)
        except ModelError as error:
            raise DataError(want.where, str(error)) from error
        stored = encoders.outputs(self._card)[want.key.kind].stored
        rounded = made.to(torch_dtype(stored))
        if not rounded.isfinite().all():
            raise DataError(want.where, f"{want.key.kind} is beyond what {stored} holds", value=float(made.abs().max()))
        return rounded

    def _encoded(self, want: Want) -> torch.Tensor:
        kind = want.key.kind
        if kind == COND:
            return _stripped(encoders.encode_prompt(self._encoder(), want.prompt))
        assert want.media is not None and want.shape is not None, "neither a prompt nor media"
        if kind == LATENT:
            generator = torch.Generator("cpu").manual_seed(want.key.seed)
            return encoders.encode_media(self._encoder(), pixels(want.media, want.shape), generator)
        picture = first_frame(want.media, want.shape)
        return encoders.encode_first_frame(self._encoder(), kind, picture, want.shape.num_frames)

    def _encoder(self) -> Encoder:
        if self._loaded is None:
            self._loaded = encoders.load_encoder(self._card, self._device)
        return self._loaded


def _stripped(cond: torch.Tensor) -> torch.Tensor:
    """Without the zeros past the prompt, which are most of it."""
    used = cond.any(dim=1).nonzero()
    return cond[: int(used.max()) + 1 if len(used) else 1]
