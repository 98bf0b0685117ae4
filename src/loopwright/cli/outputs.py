"""Where a command's files go: checked before the work, and never over a file nobody named.

place = place_of("clips", several=True, flag="--output-path")
place.check("a fox", 7, ".mp4")                # raises now rather than after the work
result.save(place.path("a fox", 7, ".mp4"))    # clips/a-fox-7.mp4, or -7-2.mp4 if that exists
"""

import itertools
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import MediaError, RequestError

VIDEO, STILL, LATENTS = ".mp4", ".png", ".safetensors"
_LONGEST_SLUG = 48  # four bytes a character, a seed and a temporary file's mark still fit a file name


@dataclass(frozen=True, slots=True)
class Place:
    """One `file`, or a `folder` in which each result gets a name of its own."""

    folder: Path
    file: Path | None = None

    def path(self, prompt: str, seed: int, suffix: str) -> Path:
        """The file to write: the named one, replaced if it exists, else a free name in the folder."""
        return self.file or free(self.folder / f"{slug(prompt)}-{seed}{suffix}")

    def check(self, prompt: str, seed: int, suffix: str) -> None:
        """Raise MediaError unless the file could be written."""
        check_writable(self.path(prompt, seed, suffix))


def place_of(given: str, *, several: bool, flag: str) -> Place:
    """What the user named with `flag`: a folder if it is one or has no suffix. Raises RequestError for one file."""
    path = Path(given)
    if os.path.isdir(path) or not path.suffix or given.endswith(("/", os.sep)):
        return Place(path)
    if several:
        raise RequestError(f"{flag} names one file for several prompts", value=given, remedy="give a folder")
    return Place(path.parent, path)


def check_writable(path: Path) -> None:
    """Raise MediaError unless a result could be written there. Leaves no trace."""
    from .. import media

    if path.suffix != LATENTS:
        if path.suffix.lower() not in media.SUFFIXES:
            raise MediaError(
                "cannot tell the format from the file's suffix",
                value=str(path),
                choices=(*media.SUFFIXES, f"{LATENTS} (latents)"),
            )
        media.check_writable(path)
        return
    if os.path.isdir(path):  # unlike the method of paths, it takes any name
        raise MediaError("a folder is in the place of the file", value=str(path), remedy="name a file")
    try:
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:
        raise MediaError(
            f"cannot write {path} ({getattr(error, 'strerror', None) or error})", remedy="choose another place"
        ) from error


def rehearse(suffix: str, frames: int, fps: int, record: Mapping[str, object]) -> None:
    """Write as many small black frames in that format and drop them: only its writer knows what it refuses.

    PNG and JPEG hold one frame, GIF goes to 50 frames a second, and a long record does not fit every format.
    """
    if suffix == LATENTS:
        return
    import numpy as np

    from .. import media

    with tempfile.TemporaryDirectory() as folder:
        black = np.zeros((frames, 16, 16, 3), np.uint8)
        media.write(Path(folder) / f"rehearsal{suffix}", black, fps=fps, metadata=record)


def free(path: Path) -> Path:
    """The path, or the first of `-2`, `-3` ... that does not exist."""
    numbered = (path.with_name(f"{path.stem}-{n}{path.suffix}") for n in itertools.count(2))
    return next(p for p in itertools.chain([path], numbered) if not os.path.lexists(p))


def slug(prompt: str) -> str:
    """A prompt as a file name: letters and digits of any script, joined by dashes."""
    return re.sub(r"[\W_]+", "-", prompt.lower()).strip("-")[:_LONGEST_SLUG].strip("-") or "untitled"
