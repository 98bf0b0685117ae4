"""Small pictures and films with known content, and data sets made of them."""

import json
from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from PIL import Image


def grey(count: int, height: int = 32, width: int = 48) -> np.ndarray:
    """Frames that tell their number: frame i is flat at 20 + 6 i."""
    return np.stack([np.full((height, width, 3), 20 + 6 * index, np.uint8) for index in range(count)])


def number(pixels: np.ndarray) -> list[int]:
    """The numbers of frames of `grey`, from pixels `[C,T,H,W]` in [-1, 1]."""
    means = (np.asarray(pixels).mean(axis=(0, 2, 3)) + 1) * 127.5
    return [round((mean - 20) / 6) for mean in means.tolist()]


def film(path: Path, frames: np.ndarray, rotation: float = 0, cover: bool = False) -> Path:
    """Write an MP4, turned by so many degrees when shown, perhaps with a white cover before its video."""
    with av.open(str(path), "w", format="mp4") as container:
        art = container.add_stream("mjpeg", rate=Fraction(1)) if cover else None
        if art is not None:
            art.width, art.height, art.pix_fmt = 16, 16, "yuvj420p"
            art.disposition = av.stream.Disposition.attached_pic
        stream = container.add_stream("libx264", rate=Fraction(10), options={"crf": "4"})
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.set_display_rotation(rotation)
        if art is not None:
            picture = av.VideoFrame.from_ndarray(np.full((16, 16, 3), 255, np.uint8), format="rgb24")
            container.mux(art.encode(picture.reformat(format="yuvj420p")))
            container.mux(art.encode(None))
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))
    return path


def photo(path: Path, pixels: np.ndarray, orientation: int = 1) -> Path:
    """Write an image whose EXIF asks to be turned."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(pixels).save(path, exif=exif)
    return path


def jsonl(path: Path, rows: Iterable[Mapping[str, object] | str]) -> Path:
    """Write rows, a line each; text is written as it is."""
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path
