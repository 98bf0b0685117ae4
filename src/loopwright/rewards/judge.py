"""An independent judge of text: Tesseract, which is asked how training went and never trained on.

    share = sum(judge.exact(samples)) / len(samples)        # judge = Tesseract()

Whoever optimises one reader's score may learn what that reader falls for; another reader tells. So this is no reward:
`rewards.parse` refuses it, and `rewards.judges` takes it. Needs the program `tesseract` (Debian: tesseract-ocr), a
tenth of a second or more a picture.
"""

import io
import os
import shutil
import subprocess
from collections.abc import Sequence

import numpy as np
from PIL import Image

from ..errors import BackendError
from .facts import text
from .ocr import plain
from .pictures import Picture, spread
from .recogniser import contrast, place
from .reward import Sample

_SCALE, _PAD = 4, 8  # times, pixels of the picture


class Tesseract:
    """Reads one line a picture. `frames` of a video are read, and one that reads right is enough."""

    def __init__(self, frames: int = 3) -> None:
        program = shutil.which("tesseract")
        if program is None:
            raise BackendError("the program tesseract is not installed", remedy="apt-get install tesseract-ocr")
        self._program, self._frames = program, frames

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        """1 for each sample whose text is read as it should be, else 0."""
        return list(map(float, self.exact(samples)))

    @staticmethod
    def wanted(samples: Sequence[Sample]) -> list[str]:
        """The texts asked for. Raises RequestError."""
        return list(map(text, samples))

    def exact(self, samples: Sequence[Sample]) -> list[bool]:
        """Whether each sample's text is read as it should be, but for case and spaces."""
        return [
            any(plain(said) == plain(text(sample)) for said in self.read(spread(sample, self._frames)))
            for sample in samples
        ]

    def read(self, pictures: Sequence[Picture]) -> list[str]:
        """What each picture (uint8 [H, W, 3]) says, "" where nothing stands out. Raises BackendError if it fails."""
        return [self._read(picture) for picture in pictures]

    def _read(self, picture: Picture) -> str:
        page = _page(picture)
        if page is None:
            return ""
        done = subprocess.run(
            [self._program, "stdin", "stdout", "--psm", "7"],  # one line of text
            input=page,
            capture_output=True,
            check=False,
            env={**os.environ, "OMP_THREAD_LIMIT": "1"},
        )
        if done.returncode:
            raise BackendError("tesseract failed", value=done.stderr.decode(errors="replace").strip())
        return done.stdout.decode().strip()


def _page(picture: Picture) -> bytes | None:
    """What stands out, dark on white, enlarged and with a margin, as a PNG; None where nothing does."""
    distance = contrast(picture)
    found = place(distance)
    if found is None:
        return None
    part = distance[found]
    ink = np.pad((255 * (1 - part / part.max())).astype(np.uint8), _PAD, constant_values=255)
    page, buffer = Image.fromarray(ink), io.BytesIO()
    page.resize((page.width * _SCALE, page.height * _SCALE), Image.Resampling.BICUBIC).save(buffer, "PNG")
    return buffer.getvalue()
