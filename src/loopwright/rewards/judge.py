"""An independent judge of text: Tesseract, which is asked how training went and never trained on.

    share = sum(judge.exact(samples)) / len(samples)        # judge = Tesseract()

Whoever optimises one reader's score may learn what that reader falls for; another reader tells. So this is no reward:
`rewards.parse` refuses it, and `rewards.judges` takes it. A sample that it cannot read for want of the program's answer
has no score, and is counted. Needs the program `tesseract` (Debian: tesseract-ocr), a tenth of a second or more a
picture.
"""

import io
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence

import numpy as np
from PIL import Image

from ..errors import BackendError, RequestError
from .facts import text
from .ocr import plain
from .pictures import Picture, spread
from .recogniser import contrast, place
from .reward import Sample

_SCALE, _PAD = 4, 8  # times, pixels of the picture


class Tesseract:
    """Reads one line a picture, in `timeout` seconds. `frames` of a video are read, and one that reads right is enough.

    Raises BackendError without the program.
    """

    def __init__(self, frames: int = 3, timeout: float = 30.0) -> None:
        if frames < 1 or timeout <= 0:
            value = f"{frames} frames, {timeout:g} s"
            raise RequestError("a judge must be shown a frame and have time", value=value, remedy="give more")
        program = shutil.which("tesseract")
        if program is None:
            raise BackendError("the program tesseract is not installed", remedy="apt-get install tesseract-ocr")
        self.failures: Counter[str] = Counter()
        self._program, self._frames, self._timeout = program, frames, timeout

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        """1 for each sample whose text is read as it should be, else 0; None where reading failed."""
        return list(map(self._score, samples))

    @staticmethod
    def wanted(samples: Sequence[Sample]) -> list[str]:
        """The texts asked for. Raises RequestError."""
        return list(map(text, samples))

    def exact(self, samples: Sequence[Sample]) -> list[bool]:
        """Whether each sample's text is read as it should be, but for case and spaces. Raises as `read`."""
        return list(map(self._exact, samples))

    def read(self, pictures: Sequence[Picture]) -> list[str]:
        """What each picture (uint8 [H, W, 3]) says, "" where nothing stands out. Raises BackendError if it fails."""
        return [self._read(picture) for picture in pictures]

    def _score(self, sample: Sample) -> float | None:
        try:
            return float(self._exact(sample))
        except BackendError as error:
            self.failures[str(error)] += 1
            return None

    def _exact(self, sample: Sample) -> bool:
        wanted = plain(text(sample))
        return any(plain(said) == wanted for said in self.read(spread(sample, self._frames)))

    def _read(self, picture: Picture) -> str:
        page = _page(picture)
        return "" if page is None else self._said(page)

    def _said(self, page: bytes) -> str:
        try:
            done = subprocess.run(
                [self._program, "stdin", "stdout", "--psm", "7"],  # one line of text
                input=page,
                capture_output=True,
                check=False,
                env={**os.environ, "OMP_THREAD_LIMIT": "1"},
                timeout=self._timeout,
            )
        except subprocess.TimeoutExpired as error:
            raise BackendError("tesseract gives no answer in time", value=f"{self._timeout:g} s") from error
        except OSError as error:
            raise BackendError(f"tesseract cannot be run ({error})") from error
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip()
            raise BackendError(f"tesseract failed with status {done.returncode}", value=said)
        return done.stdout.decode(errors="replace").strip()


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
