"""Reads one line of text in pictures, by the recogniser of `rapidocr` (PP-OCR, on onnxruntime).

    Reader()(pictures)      # ["lamp", ...] for uint8 pictures [H, W, 3]

The text is found by its contrast with the border's colour, cropped and enlarged; the package's own detector is neither
needed nor as fast.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime
import rapidocr
from numpy.typing import NDArray
from PIL import Image

_MODEL = Path(rapidocr.__file__).parent / "models" / "PP-OCRv6_rec_small.onnx"
_HEIGHT, _BATCH, _CONTRAST, _MARGIN = 48, 64, 0.25, 2
Picture = NDArray[np.uint8]


class Reader:
    """The recogniser, with its alphabet."""

    def __init__(self) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(str(_MODEL), options, providers=["CPUExecutionProvider"])
        listed = self._session.get_modelmeta().custom_metadata_map["character"].splitlines()
        self._alphabet = ["", *listed, " "]

    def __call__(self, pictures: Sequence[Picture]) -> list[str]:
        """What each picture says, "" where nothing stands out."""
        lines = [_line(picture) for picture in pictures]
        return [text for i in range(0, len(lines), _BATCH) for text in self._read(lines[i : i + _BATCH])]

    def _read(self, lines: Sequence[Image.Image]) -> list[str]:
        width = max(line.width for line in lines)
        batch = np.zeros((len(lines), 3, _HEIGHT, width), np.float32)
        for row, line in zip(batch, lines, strict=True):
            row[:, :, : line.width] = (np.asarray(line, np.float32)[..., ::-1] / 127.5 - 1).transpose(2, 0, 1)
        (scores,) = self._session.run(None, {"x": batch})
        return [self._text(row) for row in scores.argmax(axis=-1)]

    def _text(self, best: NDArray[np.int64]) -> str:
        """Repeated signs are one, and blanks none."""
        kept = [int(b) for a, b in zip([0, *best[:-1]], best, strict=True) if b and a != b]
        return "".join(self._alphabet[index] for index in kept)


def _line(picture: Picture) -> Image.Image:
    """The part that stands out from the border, as high as the recogniser wants it."""
    border = np.concatenate([picture[0], picture[-1], picture[:, 0], picture[:, -1]])
    contrast = np.abs(picture.astype(np.float32) - np.median(border, axis=0)).max(axis=-1) / 255
    rows, columns = (np.flatnonzero((contrast > _CONTRAST).any(axis=axis)) for axis in (1, 0))
    if len(rows) == 0:
        return Image.new("RGB", (_HEIGHT, _HEIGHT))
    top, bottom = max(rows[0] - _MARGIN, 0), rows[-1] + 1 + _MARGIN
    left, right = max(columns[0] - _MARGIN, 0), columns[-1] + 1 + _MARGIN
    part = Image.fromarray(picture[top:bottom, left:right])
    return part.resize((max(round(part.width * _HEIGHT / part.height), 8), _HEIGHT), Image.Resampling.BICUBIC)
