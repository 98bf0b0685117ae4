"""Writes images and videos by their suffix, whole or not at all."""

import itertools
import math
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from ..errors import MediaError
from ..files import replacing
from .pixels import PathLike, Pixels, as_video, brief
from .record import KEY, dump, exif

_MAX_GIF_FPS = 50  # browsers slow anything faster down to ten frames a second


def write(path: PathLike, frames: Pixels, *, fps: float, metadata: Mapping[str, object]) -> None:
    """Write a video or an image by its suffix (`SUFFIXES`); an existing file is replaced whole or not at all.

    MP4 is H.264 4:2:0 in BT.709, which every browser plays; an odd width or height gains one repeated column or row,
    where diffusers' `export_to_video` would stretch the picture to a multiple of 16. GIF has 256 colours a frame.
    PNG and WebP are lossless. PNG and JPEG hold one frame, and their `fps` is ignored. `metadata` must be JSON values.
    """
    target = Path(path)
    writer = _writer(target)
    video, text = as_video(frames), dump(metadata)
    with _writing(target), replacing(target) as temporary:
        writer(temporary, video, fps, text)


def check_writable(path: PathLike) -> None:
    """Fail before the work rather than after it: MediaError unless `write` could create this file. Leaves no trace."""
    target = Path(path)
    _writer(target)
    with _writing(target):
        if _is_folder(target):
            raise MediaError("a folder is in the place of the file", value=str(target), remedy="name a file")
        # Permission bits mislead, as for root, so a nameless file is made and lost in the nearest folder that exists.
        folder = next(parent for parent in target.absolute().parents if parent.exists())
        with tempfile.TemporaryFile(dir=folder):
            pass


def _write_mp4(path: Path, frames: Pixels, fps: float, text: str) -> None:
    height, width = (size + size % 2 for size in frames.shape[1:3])
    with av.open(str(path), "w", format="mp4", options={"movflags": "+faststart"}) as container:
        container.metadata["comment"] = text
        stream = container.add_stream("libx264", rate=_rate(fps), options={"crf": "15"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        context = stream.codec_context
        context.colorspace, context.color_range = Colorspace.ITU709, ColorRange.MPEG
        context.color_primaries, context.color_trc = ColorPrimaries.BT709, ColorTrc.BT709
        for frame in frames:
            container.mux(stream.encode(_yuv(frame)))
        container.mux(stream.encode(None))


def _yuv(frame: Pixels) -> av.VideoFrame:
    """Even-sized 4:2:0 in BT.709: players guess the matrix of untagged files, and guess by picture size."""
    even = np.pad(frame, ((0, frame.shape[0] % 2), (0, frame.shape[1] % 2), (0, 0)), mode="edge")
    rgb = av.VideoFrame.from_ndarray(np.ascontiguousarray(even), format="rgb24")
    return rgb.reformat(format="yuv420p", dst_colorspace=Colorspace.ITU709, dst_color_range=ColorRange.MPEG)


def _write_gif(path: Path, frames: Pixels, fps: float, text: str) -> None:
    if fps > _MAX_GIF_FPS:
        raise MediaError("too fast for a GIF, in frames per second", value=fps, remedy="use .mp4 or .webp")
    _save_animation(path, frames, "GIF", _durations(len(frames), fps, unit=10), comment=text.encode("utf-8"))


def _write_webp(path: Path, frames: Pixels, fps: float, text: str) -> None:
    options = {"lossless": True, "exif": exif(text)}
    if len(frames) == 1:
        Image.fromarray(frames[0]).save(path, "WEBP", **options)
    else:
        _save_animation(path, frames, "WEBP", _durations(len(frames), fps, unit=1), **options)


def _save_animation(path: Path, frames: Pixels, kind: str, durations: list[int], **options: object) -> None:
    first, *others = [Image.fromarray(frame) for frame in frames]
    first.save(path, kind, save_all=True, append_images=others, duration=durations, loop=0, **options)


def _durations(count: int, fps: float, unit: int) -> list[int]:
    """Milliseconds a frame in whole units, rounded on the clock and not one by one, so that the film keeps time."""
    ticks = [round(1000 / unit * index / _rate(fps)) for index in range(count + 1)]
    return [unit * max(1, later - earlier) for earlier, later in itertools.pairwise(ticks)]


def _write_png(path: Path, frames: Pixels, fps: float, text: str) -> None:
    chunk = PngInfo()
    chunk.add_itxt(KEY, text)
    Image.fromarray(_only(frames, ".png")).save(path, "PNG", pnginfo=chunk)


def _write_jpeg(path: Path, frames: Pixels, fps: float, text: str) -> None:
    data = exif(text)
    if len(data) > 65_000:  # one JPEG segment, less its header
        raise MediaError("too much metadata for a JPEG, in bytes", value=len(data), remedy="use .png or .webp")
    Image.fromarray(_only(frames, ".jpg")).save(path, "JPEG", quality=95, subsampling=0, exif=data)


def _only(frames: Pixels, suffix: str) -> Pixels:
    if len(frames) > 1:
        raise MediaError(f"a {suffix} holds one frame", value=len(frames), choices=(".mp4", ".gif", ".webp"))
    frame: Pixels = frames[0]
    return frame


def _rate(fps: float) -> Fraction:
    """The exact rate a float stands for: 23.976 is 24000/1001 to broadcasters, and 0.1 is 1/10."""
    rate = Fraction(fps).limit_denominator(1001) if math.isfinite(fps) else Fraction(0)
    if rate <= 0:
        raise MediaError("frames per second must be positive", value=fps)
    return rate


_WRITERS: dict[str, Callable[[Path, Pixels, float, str], None]] = {
    ".mp4": _write_mp4,
    ".gif": _write_gif,
    ".webp": _write_webp,
    ".png": _write_png,
    ".jpg": _write_jpeg,
    ".jpeg": _write_jpeg,
}
SUFFIXES: tuple[str, ...] = tuple(_WRITERS)


def _writer(target: Path) -> Callable[[Path, Pixels, float, str], None]:
    writer = _WRITERS.get(target.suffix.lower())
    if writer is None:
        raise MediaError("cannot tell the format from the file's suffix", value=str(target), choices=SUFFIXES)
    return writer


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    """Name the file in whatever the system or an encoder raises while making it."""
    try:
        yield
    except MediaError:
        raise
    except (OSError, ValueError, av.FFmpegError) as error:
        raise MediaError(f"cannot write {target} ({brief(error)})", remedy="choose another place") from error


def _is_folder(target: Path) -> bool:
    """Raises OSError for a name too long and for a parent that is a file, where `Path.is_dir` just says no."""
    try:
        return stat.S_ISDIR(os.stat(target).st_mode)
    except FileNotFoundError:
        return False
