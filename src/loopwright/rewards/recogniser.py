"""Recognises one line of text in a picture: PP-OCR's recogniser, called directly on onnxruntime.

    recogniser = Recogniser()
    recogniser.read(pictures)                       # ["lamp", ...] for uint8 pictures [H, W, 3]
    for places, probabilities in recogniser.batches(pictures): ...

Where the text lies is told by its contrast with the border's colour; the package's own detector is neither needed nor
as fast. Pictures are batched with those of equal width alone, so that nobody's score depends on who else is in a call.
Needs the `ocr` extra, which brings the weights. In bfloat16 OpenVINO computes, in about half the time; that needs the
`openvino` extra and a processor with such instructions. Deliberately absent: several lines in one picture.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..errors import BackendError, RequestError
from .pictures import Picture

Probabilities = NDArray[np.float32]
Network = Callable[[NDArray[np.float32]], Probabilities]
PRECISIONS = ("float32", "bfloat16")
BLANK = 0
_WEIGHTS = Path("models") / "PP-OCRv6_rec_small.onnx"
_HEIGHT, _GRAIN, _BATCH = 48, 8, 16  # pixels, pixels (a column of the answer), pictures
_CONTRAST, _MARGIN = 0.25, 2  # of full scale, pixels
_AIR = 1 / 3  # above and below, of the text's height: blurred text is read better, and in fewer columns


class Recogniser:
    """PP-OCRv6 (small), with its alphabet. Weights are read at the first use; several threads may use one.

    Raises RequestError for another precision than "float32" and "bfloat16", BackendError where that cannot be computed.
    """

    def __init__(self, threads: int = 1, precision: str = "float32") -> None:
        if precision not in PRECISIONS:
            raise RequestError("the recogniser has no such precision", value=precision, choices=PRECISIONS)
        self._path, self._threads, self._precision = _weights(), threads, precision
        if precision == "bfloat16":
            _require_bfloat16()

    def read(self, pictures: Sequence[Picture]) -> list[str]:
        """What each picture says, "" where nothing stands out."""
        texts = [""] * len(pictures)
        for places, probabilities in self.batches(pictures):
            for place, best in zip(places, probabilities.argmax(axis=-1), strict=True):
                texts[place] = self._text(best)
        return texts

    def batches(self, pictures: Sequence[Picture]) -> Iterator[tuple[list[int], Probabilities]]:
        """Places of pictures, and what their columns say: [N, columns, letters], each a distribution, 0 the blank.

        A picture in which nothing stands out is in no batch.
        """
        groups: defaultdict[int, list[int]] = defaultdict(list)
        lines = [line(picture) for picture in pictures]
        for place, found in enumerate(lines):
            if found is not None:
                groups[-found.width // _GRAIN * -_GRAIN].append(place)
        for width, places in groups.items():
            for start in range(0, len(places), _BATCH):
                some = places[start : start + _BATCH]
                batch = _batch([found for place in some if (found := lines[place]) is not None], width)
                yield some, self._network(batch)

    @cached_property
    def letters(self) -> dict[str, int]:
        """The alphabet: which of a column's numbers is whose."""
        listed = self._loaded[1].splitlines()
        return {letter: index for index, letter in enumerate([*listed, " "], start=BLANK + 1)}

    @cached_property
    def _signs(self) -> list[str]:
        return ["", *self.letters]

    def _text(self, best: NDArray[np.int64]) -> str:
        """Repeated signs are one, and blanks none."""
        kept = [int(b) for a, b in zip([BLANK, *best[:-1]], best, strict=True) if b not in (BLANK, a)]
        return "".join(self._signs[index] for index in kept)

    @property
    def _network(self) -> Network:
        return self._loaded[0]

    @cached_property
    def _loaded(self) -> tuple[Network, str]:
        """The network, and its alphabet a letter a line."""
        return (_float32 if self._precision == "float32" else _bfloat16)(self._path, self._threads)


def line(picture: Picture) -> Image.Image | None:
    """The part that stands out from the border's colour, as high as the recogniser wants it; None where none does."""
    found = place(contrast(picture))
    if found is None:
        return None
    part = Image.fromarray(picture[found])
    return part.resize((max(round(part.width * _HEIGHT / part.height), 8), _HEIGHT), Image.Resampling.BICUBIC)


def contrast(picture: Picture) -> NDArray[np.float32]:
    """How far each pixel is from the border's median colour, 0..1: [H, W]."""
    border = np.concatenate([picture[0], picture[-1], picture[:, 0], picture[:, -1]])
    difference = np.abs(picture.astype(np.float32) - np.median(border, axis=0).astype(np.float32))
    return np.asarray(difference.max(axis=-1) / 255, np.float32)


def place(distance: NDArray[np.float32]) -> tuple[slice, slice] | None:
    """Rows and columns of what stands out, with a margin; None where nothing does."""
    rows, columns = (np.flatnonzero((distance > _CONTRAST).any(axis=axis)) for axis in (1, 0))
    if len(rows) == 0:
        return None
    above = max(_MARGIN, round((rows[-1] + 1 - rows[0]) * _AIR))
    top, left = max(int(rows[0]) - above, 0), max(int(columns[0]) - _MARGIN, 0)
    return slice(top, int(rows[-1]) + 1 + above), slice(left, int(columns[-1]) + 1 + _MARGIN)


def _batch(lines: Sequence[Image.Image], width: int) -> NDArray[np.float32]:
    """BGR in -1..1, filled up with zeros on the right: [N, 3, 48, width]."""
    batch = np.zeros((len(lines), 3, _HEIGHT, width), np.float32)
    for row, found in zip(batch, lines, strict=True):
        row[:, :, : found.width] = (np.asarray(found, np.float32)[..., ::-1] / 127.5 - 1).transpose(2, 0, 1)
    return batch


def _float32(path: Path, threads: int) -> tuple[Network, str]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda batch: session.run(None, {"x": batch})[0], session.get_modelmeta().custom_metadata_map["character"]


def _bfloat16(path: Path, threads: int) -> tuple[Network, str]:
    import openvino

    core = openvino.Core()
    model = core.read_model(path)
    how = {
        "INFERENCE_PRECISION_HINT": "bf16",
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "ENABLE_CPU_PINNING": False,  # every process of a pool would take the same core
    }
    compiled = core.compile_model(model, "CPU", how)
    return lambda batch: compiled.infer_new_request(batch)[0], str(model.get_rt_info(["framework", "character"]).value)


def _require_bfloat16() -> None:
    """Raises BackendError where OpenVINO is not installed, or the processor has no such instructions."""
    if find_spec("openvino") is None:
        raise BackendError("reading text in bfloat16 needs openvino", remedy="pip install 'loopwright[openvino]'")
    import openvino

    if "BF16" not in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        raise BackendError("this processor does not compute in bfloat16", remedy="read text in float32")


def _weights() -> Path:
    """The file that `rapidocr` brings. Raises BackendError where it or onnxruntime is not installed."""
    package = find_spec("rapidocr")
    if package is None or package.origin is None or find_spec("onnxruntime") is None:
        raise BackendError("reading text needs rapidocr and onnxruntime", remedy="pip install 'loopwright[ocr]'")
    path = Path(package.origin).parent / _WEIGHTS
    if not path.is_file():
        raise BackendError(
            "this rapidocr brings no PP-OCRv6 recogniser", value=str(path), remedy="install rapidocr 3.10"
        )
    return path
