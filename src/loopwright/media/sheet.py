"""Many frames in one picture."""

import math

import numpy as np

from ..errors import MediaError
from .pixels import Pixels, as_video


def contact_sheet(frames: Pixels, *, columns: int | None = None, gap: int = 2, scale: int | None = None) -> Pixels:
    """The frames in a grid on white, `[H,W,3]`: at most 16, evenly chosen, first and last among them.

    `scale` enlarges each pixel to a square; by default just enough for a sheet about 600 pixels wide.
    """
    video = as_video(frames)
    chosen = video[np.linspace(0, len(video) - 1, min(len(video), 16)).round().astype(int)]
    count, height, width, _ = chosen.shape
    columns = min(math.ceil(math.sqrt(count)) if columns is None else columns, count)
    if columns < 1 or gap < 0 or (scale is not None and scale < 1):
        raise MediaError("a contact sheet needs positive columns and scale", value=(columns, gap, scale))
    scale = scale or max(1, math.ceil((600 - gap * (columns + 1)) / (columns * width)))
    height, width, rows = height * scale, width * scale, math.ceil(count / columns)
    sheet = np.full((gap + rows * (height + gap), gap + columns * (width + gap), 3), 255, np.uint8)
    for index, frame in enumerate(chosen):
        top, left = gap + index // columns * (height + gap), gap + index % columns * (width + gap)
        sheet[top : top + height, left : left + width] = frame.repeat(scale, 0).repeat(scale, 1)
    return sheet
