"""Pixels of an uploaded file, which is not trusted: its first bytes tell its kind, its header how many pixels it has.

    frames = decode(contents, "image", folder, most=2**24)

Only formats that hold their own pixels are opened: none that names other files or URLs ever reaches a decoder.
"""

import tempfile
from pathlib import Path

from PIL import Image

from .. import media
from ..errors import MediaError
from ..request import Frames

_IMAGES = {b"\x89PNG\r\n\x1a\n": ".png", b"\xff\xd8\xff": ".jpg"}
_TAKEN = {"image": ("PNG", "JPEG", "WebP"), "video": ("MP4", "WebM")}


def kind_of(contents: bytes) -> tuple[str, str]:
    """ "image" or "video", and a suffix. Raises MediaError for anything else."""
    for start, suffix in _IMAGES.items():
        if contents.startswith(start):
            return "image", suffix
    if contents[:4] == b"RIFF" and contents[8:12] == b"WEBP":
        return "image", ".webp"
    if contents[4:8] == b"ftyp":
        return "video", ".mp4"
    if contents[:4] == b"\x1aE\xdf\xa3":
        return "video", ".webm"
    choices = [name for names in _TAKEN.values() for name in names]
    raise MediaError("an uploaded file is of no kind that is read here", value=contents[:8], choices=choices)


def decode(contents: bytes, wanted: str, folder: Path, *, most: int) -> Frames:
    """RGB frames of an image or a video of at most `most` pixels in all. Raises MediaError."""
    kind, suffix = kind_of(contents)
    if kind != wanted:
        named = {"image": "an image", "video": "a video"}
        raise MediaError(f"the file holds {named[kind]} where this needs {named[wanted]}", choices=_TAKEN[wanted])
    with tempfile.NamedTemporaryFile(dir=folder, suffix=suffix) as file:
        file.write(contents)
        file.flush()
        try:
            return _read(Path(file.name), kind, most)
        except MediaError as error:
            raise MediaError(str(error).replace(file.name, f"the {kind}")) from None


def _read(path: Path, kind: str, most: int) -> Frames:
    height, width, frames = _extent(path, kind)
    if height * width * frames > most:
        told = f"{width}x{height}" + (f", {frames} frames" if frames > 1 else "")
        raise MediaError(f"the {kind} has too many pixels", value=told, remedy=f"at most {most} in all frames")
    pixels = media.read_image(path)[None] if kind == "image" else media.read_video(path)[0]
    return Frames(pixels.tobytes(), pixels.shape, "")


def _extent(path: Path, kind: str) -> tuple[int, int, int]:
    """Height, width and frames. `media` would look for a PNG's orientation behind its pixels, and decode these."""
    if kind == "video":
        return media.measure_video(path)
    try:
        with Image.open(path) as image:
            return image.height, image.width, 1
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise MediaError(f"cannot read the image ({error})", remedy="it may be truncated") from error
