"""Reads and writes images and videos, and keeps in each file how it was made.

    frames, fps = read_video("fox.mp4")                                # uint8 [T,H,W,3]
    write("copy.webp", frames, fps=fps, metadata={"prompt": "a fox"})
    read_metadata("copy.webp")["prompt"]

Pixels are numpy uint8, RGB, `[T,H,W,3]` for a video and `[H,W,3]` for an image. The metadata is one JSON text in the
place each format keeps for comments, so an MP4 carries its prompt wherever it is copied. Deliberately absent: sound,
torch, resizing, and any lossless MP4 (use .webp or .png for exact pixels).
"""

import itertools
import json
import math
import os
import stat
import statistics
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import av
import numpy as np
import numpy.typing as npt
from av.sidedata.sidedata import Type as SideDataType
from av.stream import Disposition
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc
from PIL import ExifTags, Image, ImageOps, ImageSequence
from PIL.PngImagePlugin import PngInfo

from .errors import MediaError
from .files import replacing

Pixels = npt.NDArray[np.uint8]
PathLike = str | os.PathLike[str]

_KEY = "loopwright"
_MAX_PIXELS = 89_478_485  # Pillow's own line between a large image and a decompression bomb
_BROKEN = (
    *(OSError, ValueError, SyntaxError, EOFError, IndexError, struct.error, zlib.error),  # what Pillow's parsers raise
    *(Image.DecompressionBombError, av.FFmpegError),
)
_QUARTER_TURNS = (5, 6, 7, 8)  # EXIF orientations that swap height and width
_IMAGE_STARTS = (b"GIF8", b"RIFF", b"\x89PNG", b"\xff\xd8")
_HIDES_FRAMES = ("vp8", "libvpx")
_USER_COMMENT = b"UNICODE\0"  # EXIF's marker for a UTF-16 comment
_MAX_GIF_FPS = 50  # browsers slow anything faster down to ten frames a second


class Extent(NamedTuple):
    """Height and width in pixels, and frames; an image has one."""

    height: int
    width: int
    frames: int


def read_image(path: PathLike) -> Pixels:
    """One image `[H,W,3]`, turned as its EXIF asks, alpha laid on white; the first frame of an animation."""
    with _reading(path) as file, _open_image(file) as image:
        return _rgb(ImageOps.exif_transpose(image))


def read_video(path: PathLike) -> tuple[Pixels, float]:
    """Every frame `[T,H,W,3]`, turned as the file's display matrix asks, and the mean frames per second.

    Animated GIF and WebP hold each frame for its own time; those held longer than most are repeated, so that the
    frames are evenly spaced. Raises MediaError for a missing, broken or truncated file and one without a video.
    """
    with _reading(path) as file:
        return _read_animation(file) if _is_animation(file) else _read_stream(file)


def measure_image(path: PathLike) -> Extent:
    """The size of an image as it is shown. Reads no pixels."""
    with _reading(path) as file, _open_image(file) as image:
        turned = image.getexif().get(ExifTags.Base.Orientation, 1) in _QUARTER_TURNS
        height, width = image.size if turned else image.size[::-1]
        return Extent(height, width, 1)


def measure_video(path: PathLike) -> Extent:
    """The size of a video as it is shown and its number of frames, by decoding the first alone."""
    with _reading(path) as file:
        if _is_animation(file):
            frames, _ = _read_animation(file)
            return Extent(frames.shape[1], frames.shape[2], len(frames))
        count = _count(file)
        first = next(_decoded(file), None)
        if first is None:
            raise MediaError("no frames in the video", value=str(file), remedy="it may be truncated")
        height, width = _upright(first).shape[:2]
        return Extent(height, width, count)


def read_window(path: PathLike, count: int, stride: int = 1) -> Iterator[Pixels]:
    """`count` frames `[H,W,3]`, each `stride` after the last, from the middle of a video, one at a time.

    Raises MediaError, with the frames there are and those needed, for a video that is too short.
    """
    span = (count - 1) * stride + 1
    with _reading(path) as file:
        if _is_animation(file):
            frames, _ = _read_animation(file)
            yield from frames[_start(file, len(frames), span) :][:span:stride]
            return
        start = _start(file, _count(file), span)
        shown = 0
        for frame in itertools.islice(_decoded(file), start, start + span, stride):
            shown += 1
            yield _upright(frame)
        if shown < count:
            raise MediaError(f"{file} ends before its index says", value=f"{start + shown * stride} frames")


def write(path: PathLike, frames: Pixels, *, fps: float, metadata: Mapping[str, object]) -> None:
    """Write a video or an image by its suffix (`SUFFIXES`); an existing file is replaced whole or not at all.

    MP4 is H.264 4:2:0 in BT.709, which every browser plays; an odd width or height gains one repeated column or row,
    where diffusers' `export_to_video` would stretch the picture to a multiple of 16. GIF has 256 colours a frame.
    PNG and WebP are lossless. PNG and JPEG hold one frame, and their `fps` is ignored. `metadata` must be JSON values.
    """
    target = Path(path)
    writer = _writer(target)
    video, text = _as_video(frames), _dump(metadata)
    with _writing(target), replacing(target) as temporary:
        writer(temporary, video, fps, text)


def read_metadata(path: PathLike) -> dict[str, object]:
    """What `write` embedded. Raises MediaError if the file carries nothing of Loopwright's."""
    with _reading(path) as file:
        text = _image_text(file) if _starts_with(file, *_IMAGE_STARTS) else _stream_text(file)
    try:
        found = json.loads(text)[_KEY]
    except (ValueError, KeyError, TypeError):
        found = None
    if not isinstance(found, dict):
        remedy = "only files that Loopwright wrote carry it, and tools that re-encode them drop it"
        raise MediaError("no Loopwright metadata in the file", value=str(path), remedy=remedy)
    return found


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


def contact_sheet(frames: Pixels, *, columns: int | None = None, gap: int = 2, scale: int | None = None) -> Pixels:
    """The frames in a grid on white, `[H,W,3]`: at most 16, evenly chosen, first and last among them.

    `scale` enlarges each pixel to a square; by default just enough for a sheet about 600 pixels wide.
    """
    video = _as_video(frames)
    chosen = video[np.linspace(0, len(video) - 1, min(len(video), 16)).round().astype(int)]
    count, height, width, _ = chosen.shape
    columns = min(math.ceil(math.sqrt(count)) if columns is None else columns, count)
    if columns < 1 or gap < 0 or (scale is not None and scale < 1):
        raise MediaError("a contact sheet needs positive columns and scale", value=(columns, gap, scale))
    scale = scale or max(1, math.ceil((600 - gap * (columns + 1)) / (columns * width)))
    height, width, rows = height * scale, width * scale, math.ceil(count / columns)
    sheet = np.full((gap + rows * (height + gap), gap + columns * (width + gap), 3), 255, np.uint8)
    for index, frame in enumerate(chosen):
        top, left = gap + index // columns * (height + gap), gap + index % columns * (width + gap)
        sheet[top : top + height, left : left + width] = frame.repeat(scale, 0).repeat(scale, 1)
    return sheet


# Reading


@contextmanager
def _reading(path: PathLike) -> Iterator[Path]:
    """Name the file in whatever a decoder raises, and only there: a bug elsewhere keeps its traceback."""
    file = Path(path)
    if "\0" in str(file) or not file.exists():
        raise MediaError("no such file", value=str(file), remedy="check the path")
    try:
        yield file
    except MediaError:
        raise
    except _BROKEN as error:
        remedy = "it may be truncated, or not an image or video"
        raise MediaError(f"cannot read {file} ({_brief(error)})", remedy=remedy) from error


def _starts_with(file: Path, *patterns: bytes) -> bool:
    """By content, since people rename files; `.` stands for any byte."""
    with file.open("rb") as stream:
        head = stream.read(16)
    return any(
        len(head) >= len(pattern) and all(p in (b, ord(".")) for p, b in zip(pattern, head, strict=False))
        for pattern in patterns
    )


def _open_image(file: Path) -> Image.Image:
    image = Image.open(file)
    if image.width * image.height > _MAX_PIXELS:
        image.close()
        raise MediaError(f"{file} has too many pixels", value=image.size, remedy=f"at most {_MAX_PIXELS} are read")
    return image


def _rgb(image: Image.Image) -> Pixels:
    if image.mode.startswith("I;16"):  # Pillow's own conversion would clip 16 bits to white
        return np.stack([(np.asarray(image) >> 8).astype(np.uint8)] * 3, axis=-1)
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        white.alpha_composite(image.convert("RGBA"))
        image = white
    return np.array(image.convert("RGB"))


def _read_animation(file: Path) -> tuple[Pixels, float]:
    frames, held = [], []
    with _open_image(file) as image:
        for frame in ImageSequence.Iterator(image):
            frames.append(_rgb(frame))
            held.append(frame.info.get("duration", 0) or 100)  # milliseconds; browsers show zero as a tenth
    usual = statistics.median_low(held)
    repeats = [max(1, round(time / usual)) for time in held]
    return np.repeat(np.stack(frames), repeats, axis=0), _even_rate(sum(repeats), sum(held))


def _even_rate(count: int, milliseconds: float) -> float:
    """Whole frames per second where the format's rounding (10 ms in GIF) leaves that open: it is what was meant."""
    rate = 1000 * count / milliseconds
    whole = max(1, round(rate))
    return float(whole) if abs(1000 * count / whole - milliseconds) < 10 else rate


def _is_animation(file: Path) -> bool:
    return _starts_with(file, b"GIF8", b"RIFF....WEBP")


def _read_stream(file: Path) -> tuple[Pixels, float]:
    with _opened(file) as (_, stream):
        rate = stream.average_rate or stream.guessed_rate
    frames = [_upright(frame) for frame in _decoded(file)]
    if not frames or not rate:
        raise MediaError("no frames in the video", value=str(file), remedy="it may be truncated")
    return np.stack(frames), float(rate)


@contextmanager
def _opened(file: Path) -> Iterator[tuple[av.container.InputContainer, av.VideoStream]]:
    """The container and its video, known to be whole as far as its index goes."""
    with av.open(str(file), metadata_errors="replace") as container:
        # A song's cover is a video stream to the container, but not a video.
        streams = [s for s in container.streams.video if not s.disposition & Disposition.attached_pic]
        if not streams:
            raise MediaError("no video in the file", value=str(file), remedy="give a file with a video stream")
        _refuse_truncated(file, streams[0])
        yield container, streams[0]


def _decoded(file: Path) -> Iterator[av.VideoFrame]:
    """Every frame in the order of showing. Those passed over cost no conversion to RGB."""
    with _opened(file) as (container, stream):
        stream.thread_type = "AUTO"
        for packet in container.demux(stream):
            yield from _decode(file, packet)


def _count(file: Path) -> int:
    """The frames that a decoder will show, without decoding: the packets that hold one and are not to be thrown away.

    VP8 keeps frames that are never shown in packets of their own, which only its decoder tells from the others.
    """
    with _opened(file) as (container, stream):
        if stream.codec_context.name in _HIDES_FRAMES:
            return sum(len(_decode(file, packet)) for packet in container.demux(stream))
        return sum(1 for packet in container.demux(stream) if packet.size and not packet.is_discard)


def _start(file: Path, had: int, span: int) -> int:
    """Where a window of `span` frames begins that lies in the middle."""
    if had < span:
        raise MediaError(f"{file} is too short", value=f"{had} frames", remedy=f"{span} are needed")
    return (had - span) // 2


def _refuse_truncated(file: Path, stream: av.VideoStream) -> None:
    """With its index in front, a cut file decodes happily until it ends; the index tells where it should have."""
    end = max((entry.pos + entry.size for entry in stream.index_entries), default=0)
    size = file.stat().st_size
    if end > size:
        raise MediaError(f"{file} is truncated", value=f"{size} of {end} bytes", remedy="copy or download it again")


def _decode(file: Path, packet: "av.Packet[av.VideoStream]") -> list[av.VideoFrame]:
    if packet.is_corrupt:
        raise MediaError(f"{file} is truncated or damaged", remedy="copy or download it again")
    frames: list[av.VideoFrame] = packet.decode()
    return frames


def _upright(frame: av.VideoFrame) -> Pixels:
    """The pixels as a player shows them. A matrix maps (x, y) to (a x + c y, b x + d y), y down, by quarter turns."""
    pixels: Pixels = frame.to_ndarray(format="rgb24")
    for side in frame.side_data:
        if side.type == SideDataType.DISPLAYMATRIX:
            a, b, _, c, d = np.frombuffer(bytes(side), np.int32)[:5].tolist()
            swapped = abs(b) > abs(a)
            right, down = (c, b) if swapped else (a, d)
            pixels = pixels.swapaxes(0, 1) if swapped else pixels
            pixels = pixels[:: -1 if down < 0 else 1, :: -1 if right < 0 else 1]
    return np.ascontiguousarray(pixels)


def _image_text(file: Path) -> str:
    with _open_image(file) as image:
        exif = image.getexif().get_ifd(ExifTags.IFD.Exif).get(ExifTags.Base.UserComment, b"")
        if isinstance(exif, bytes) and exif.startswith(_USER_COMMENT):
            return exif.removeprefix(_USER_COMMENT).decode("utf-16-be")
        text = image.info.get(_KEY) or image.info.get("comment") or ""
    return text.decode("utf-8") if isinstance(text, bytes) else str(text)


def _stream_text(file: Path) -> str:
    with av.open(str(file), metadata_errors="replace") as container:
        return str(container.metadata.get("comment", ""))


# Writing


def _as_video(frames: Pixels) -> Pixels:
    video = frames[None] if frames.ndim == 3 else frames
    if video.ndim != 4 or video.shape[-1] != 3 or not video.size or video.dtype != np.uint8:
        given = f"{frames.dtype} {list(frames.shape)}"
        raise MediaError("cannot use these pixels", value=given, choices=("uint8 [T,H,W,3]", "uint8 [H,W,3]"))
    return video


def _dump(metadata: Mapping[str, object]) -> str:
    """Wrapped under our name, because comments are anybody's. Readable as is, unless a character has no UTF-8."""
    wrapped = {_KEY: dict(metadata)}
    text = json.dumps(wrapped, ensure_ascii=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return json.dumps(wrapped)
    return text


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
    options = {"lossless": True, "exif": _exif(text)}
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
    chunk.add_itxt(_KEY, text)
    Image.fromarray(_only(frames, ".png")).save(path, "PNG", pnginfo=chunk)


def _write_jpeg(path: Path, frames: Pixels, fps: float, text: str) -> None:
    exif = _exif(text)
    if len(exif) > 65_000:  # one JPEG segment, less its header
        raise MediaError("too much metadata for a JPEG, in bytes", value=len(exif), remedy="use .png or .webp")
    Image.fromarray(_only(frames, ".jpg")).save(path, "JPEG", quality=95, subsampling=0, exif=exif)


def _only(frames: Pixels, suffix: str) -> Pixels:
    if len(frames) > 1:
        raise MediaError(f"a {suffix} holds one frame", value=len(frames), choices=(".mp4", ".gif", ".webp"))
    frame: Pixels = frames[0]
    return frame


def _exif(text: str) -> bytes:
    exif = Image.Exif()
    exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.UserComment] = _USER_COMMENT + text.encode("utf-16-be")
    return exif.tobytes()


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
        raise MediaError(f"cannot write {target} ({_brief(error)})", remedy="choose another place") from error


def _is_folder(target: Path) -> bool:
    """Raises OSError for a name too long and for a parent that is a file, where `Path.is_dir` just says no."""
    try:
        return stat.S_ISDIR(os.stat(target).st_mode)
    except FileNotFoundError:
        return False


def _brief(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
