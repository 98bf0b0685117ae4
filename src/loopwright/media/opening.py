"""Opens a file that may be anything, and names it in whatever is wrong with it."""

import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import av
from PIL import Image

from ..errors import MediaError
from .pixels import PathLike, brief

_MAX_PIXELS = 89_478_485  # Pillow's own line between a large image and a decompression bomb
_BROKEN = (
    *(OSError, ValueError, SyntaxError, EOFError, IndexError, struct.error, zlib.error),  # what Pillow's parsers raise
    *(Image.DecompressionBombError, av.FFmpegError),
)


@contextmanager
def reading(path: PathLike) -> Iterator[Path]:
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
        raise MediaError(f"cannot read {file} ({brief(error)})", remedy=remedy) from error


def starts_with(file: Path, *patterns: bytes) -> bool:
    """By content, since people rename files; `.` stands for any byte."""
    with file.open("rb") as stream:
        head = stream.read(16)
    return any(
        len(head) >= len(pattern) and all(p in (b, ord(".")) for p, b in zip(pattern, head, strict=False))
        for pattern in patterns
    )


def open_image(file: Path) -> Image.Image:
    """The image, its pixels not yet read. Raises MediaError for a decompression bomb."""
    image = Image.open(file)
    if image.width * image.height > _MAX_PIXELS:
        image.close()
        raise MediaError(f"{file} has too many pixels", value=image.size, remedy=f"at most {_MAX_PIXELS} are read")
    return image
