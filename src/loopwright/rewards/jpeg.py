"""How many bits a pixel takes as JPEG, for rewards of simplicity (a weight below 0) or of detail (above 0).

    JPEG()([sample])        # [1.7]

Source: the compressibility rewards of Black et al., Training Diffusion Models with Reinforcement Learning (2023), which
count kilobytes a picture; bits a pixel are the same for every size of picture.
"""

import io
from collections.abc import Sequence

from PIL import Image

from ..errors import RequestError
from .pictures import Picture
from .reward import Sample


class JPEG:
    """Bits a pixel, the mean over a clip's frames, each a picture by itself."""

    def __init__(self, quality: int = 95) -> None:
        if not 1 <= quality <= 95:
            raise RequestError("JPEG's quality is out of range", value=quality, remedy="give 1 to 95")
        self._quality = quality

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        """A number a sample, not bounded by 1."""
        return [self._bits(sample.frames.numpy()) for sample in samples]

    def _bits(self, frames: Picture) -> float:
        return 8 * sum(map(self._size, frames)) / (frames.size / 3)

    def _size(self, frame: Picture) -> int:
        buffer = io.BytesIO()
        Image.fromarray(frame).save(buffer, "JPEG", quality=self._quality)
        return buffer.tell()
