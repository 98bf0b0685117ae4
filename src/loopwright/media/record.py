"""How a file was made, kept in the file: one JSON text in the place each format keeps for comments."""

import json
from collections.abc import Mapping
from pathlib import Path

import av
from PIL import ExifTags, Image

from ..errors import MediaError
from .opening import open_image, reading, starts_with
from .pixels import PathLike

KEY = "loopwright"
_IMAGE_STARTS = (b"GIF8", b"RIFF", b"\x89PNG", b"\xff\xd8")
_USER_COMMENT = b"UNICODE\0"  # EXIF's marker for a UTF-16 comment


def read_metadata(path: PathLike) -> dict[str, object]:
    """What `write` embedded. Raises MediaError if the file carries nothing of Loopwright's."""
    with reading(path) as file:
        text = _image_text(file) if starts_with(file, *_IMAGE_STARTS) else _stream_text(file)
    try:
        found = json.loads(text)[KEY]
    except (ValueError, KeyError, TypeError):
        found = None
    if not isinstance(found, dict):
        remedy = "only files that Loopwright wrote carry it, and tools that re-encode them drop it"
        raise MediaError("no Loopwright metadata in the file", value=str(path), remedy=remedy)
    return found


def dump(metadata: Mapping[str, object]) -> str:
    """Wrapped under our name, because comments are anybody's. Readable as is, unless a character has no UTF-8."""
    wrapped = {KEY: dict(metadata)}
    text = json.dumps(wrapped, ensure_ascii=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return json.dumps(wrapped)
    return text


def exif(text: str) -> bytes:
    """The text as the comment of an image."""
    exif = Image.Exif()
    exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.UserComment] = _USER_COMMENT + text.encode("utf-16-be")
    return exif.tobytes()


def _image_text(file: Path) -> str:
    with open_image(file) as image:
        exif = image.getexif().get_ifd(ExifTags.IFD.Exif).get(ExifTags.Base.UserComment, b"")
        if isinstance(exif, bytes) and exif.startswith(_USER_COMMENT):
            return exif.removeprefix(_USER_COMMENT).decode("utf-16-be")
        text = image.info.get(KEY) or image.info.get("comment") or ""
    return text.decode("utf-8") if isinstance(text, bytes) else str(text)


def _stream_text(file: Path) -> str:
    with av.open(str(file), metadata_errors="replace") as container:
        return str(container.metadata.get("comment", ""))
