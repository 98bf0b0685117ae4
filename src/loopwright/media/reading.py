"""Reads images and videos: whole, their extent alone, or a window of a video."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from PIL import ExifTags, ImageOps

from ..errors import MediaError
from . import image as images
from . import stream
from .opening import open_image, reading
from .pixels import PathLike, Pixels

_QUARTER_TURNS = (5, 6, 7, 8)  # EXIF orientations that swap height and width


class Extent(NamedTuple):
    """Height and width in pixels, and frames; an image has one."""

    height: int
    width: int
    frames: int


def read_image(path: PathLike) -> Pixels:
    """One image `[H,W,3]`, turned as its EXIF asks, alpha laid on white; the first frame of an animation."""
    with reading(path) as file, open_image(file) as image:
        return images.rgb(ImageOps.exif_transpose(image))


def read_video(path: PathLike) -> tuple[Pixels, float]:
    """Every frame `[T,H,W,3]`, turned as the file's display matrix asks, and the mean frames per second.

    Animated GIF and WebP hold each frame for its own time; those held longer than most are repeated, so that the
    frames are evenly spaced. Raises MediaError for a missing, broken or truncated file and one without a video.
    """
    with reading(path) as file:
        return images.read_animation(file) if images.is_animation(file) else stream.read(file)


def measure_image(path: PathLike) -> Extent:
    """The size of an image as it is shown. Reads no pixels."""
    with reading(path) as file, open_image(file) as image:
        turned = image.getexif().get(ExifTags.Base.Orientation, 1) in _QUARTER_TURNS
        height, width = image.size if turned else image.size[::-1]
        return Extent(height, width, 1)


def measure_video(path: PathLike) -> Extent:
    """The size of a video as it is shown and its number of frames, by decoding the first alone."""
    with reading(path) as file:
        if images.is_animation(file):
            frames, _ = images.read_animation(file)
            return Extent(frames.shape[1], frames.shape[2], len(frames))
        count = stream.count(file)
        first = next(stream.decoded(file), None)
        if first is None:
            raise MediaError("no frames in the video", value=str(file), remedy="it may be truncated")
        height, width = stream.upright(first).shape[:2]
        return Extent(height, width, count)


def read_window(path: PathLike, count: int, stride: int = 1) -> Iterator[Pixels]:
    """`count` frames `[H,W,3]`, each `stride` after the last, from the middle of a video, one at a time.

    Raises MediaError, with the frames there are and those needed, for a video that is too short.
    """
    span = (count - 1) * stride + 1
    with reading(path) as file:
        if images.is_animation(file):
            frames, _ = images.read_animation(file)
            yield from frames[_start(file, len(frames), span) :][:span:stride]
            return
        start = _start(file, stream.count(file), span)
        shown = 0
        for frame in itertools.islice(stream.decoded(file), start, start + span, stride):
            shown += 1
            yield stream.upright(frame)
        if shown < count:
            raise MediaError(f"{file} ends before its index says", value=f"{start + shown * stride} frames")


def _start(file: Path, had: int, span: int) -> int:
    """Where a window of `span` frames begins that lies in the middle."""
    if had < span:
        raise MediaError(f"{file} is too short", value=f"{had} frames", remedy=f"{span} are needed")
    return (had - span) // 2
