"""Pixels as a request holds them, of whatever a user has: an array, a file."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import RequestError
from ..request import Frames

Pixels = NDArray[np.uint8]
Media = Pixels | str | Path | Frames


def frames(given: Media | None, *, still: bool) -> Frames | None:
    """Pixels or a file as `Frames`; only an image's first frame is meant where `still`."""
    if given is None or isinstance(given, Frames):
        return given
    source = ""
    if isinstance(given, (str, Path)):
        from .. import media

        source = str(Path(given).expanduser().resolve())
        given = media.read_image(given) if still else media.read_video(given)[0]
    pixels = np.asarray(given)
    expected = "[H, W, 3]" if still else "[T, H, W, 3]"
    if pixels.dtype != np.uint8 or pixels.ndim != (3 if still else 4) or pixels.shape[-1] != 3:
        raise RequestError(
            f"{'an image' if still else 'a video'} must be a path or uint8 pixels {expected}",
            value=f"{pixels.dtype} {list(pixels.shape)}",
        )
    shape = (1, *pixels.shape) if still else pixels.shape
    return Frames(np.ascontiguousarray(pixels).tobytes(), shape, source)
