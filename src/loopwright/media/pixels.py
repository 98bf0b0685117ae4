"""What pixels are here, and what is wrong with a file of them in one line."""

import os

import numpy as np
import numpy.typing as npt

from ..errors import MediaError

Pixels = npt.NDArray[np.uint8]
PathLike = str | os.PathLike[str]


def as_video(frames: Pixels) -> Pixels:
    """A video, or an image as one of a single frame. Raises MediaError for anything but uint8 RGB."""
    video = frames[None] if frames.ndim == 3 else frames
    if video.ndim != 4 or video.shape[-1] != 3 or not video.size or video.dtype != np.uint8:
        given = f"{frames.dtype} {list(frames.shape)}"
        raise MediaError("cannot use these pixels", value=given, choices=("uint8 [T,H,W,3]", "uint8 [H,W,3]"))
    return video


def brief(error: Exception) -> str:
    """What a library says, without its numbers and its own name where the system has a sentence."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
