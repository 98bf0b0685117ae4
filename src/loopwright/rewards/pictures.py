"""A sample's frames as pictures: which of them to look at, and as a PNG."""

import base64
import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from .reward import Sample

Picture = NDArray[np.uint8]


def spread(sample: Sample, count: int) -> list[Picture]:
    """At most `count` frames, uint8 [H, W, 3], evenly spaced, the first and the last among them."""
    frames: Picture = sample.frames.numpy()
    chosen = sorted({round(place) for place in np.linspace(0, len(frames) - 1, count)})
    return [frames[place] for place in chosen]


def png(picture: Picture) -> str:
    """A picture as a PNG in base64."""
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG", compress_level=1)
    return base64.b64encode(buffer.getvalue()).decode()
