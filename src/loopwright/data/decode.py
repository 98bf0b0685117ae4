"""From a row to the pixels that an encoder sees.

    pixels(row, Geometry(480, 832, 81))      # float32 [3, 81, 480, 832] in [-1, 1]

Frames are resized one by one as they are decoded, in float32, so that a long 4K clip never lies in memory as a whole.
Deliberately absent: which geometry a row gets, which is `buckets`'.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from .. import media
from ..errors import DataError, MediaError
from .geometry import Geometry
from .row import Row


def measure(row: Row) -> media.Extent:
    """Height, width and frames of the row's media as it is shown. Raises DataError for what cannot be read."""
    try:
        return media.measure_image(row.path) if row.kind == "image" else media.measure_video(row.path)
    except MediaError as error:
        raise DataError(row.where, str(error)) from error


def pixels(row: Row, geometry: Geometry) -> Tensor:
    """The row's media as float32 `[3, T, H, W]` in [-1, 1]; T is `geometry.num_frames`, and 1 for an image.

    Of a video, the window of `geometry.span` frames in its middle. EXIF orientation, rotation and mirroring are
    undone; covers are no video. Raises DataError for media that cannot be read or are too short.
    """
    try:
        return torch.stack([fitted(frame, geometry) for frame in _frames(row, geometry)], dim=1)
    except MediaError as error:
        raise DataError(row.where, str(error)) from error


def fitted(frame: media.Pixels, geometry: Geometry) -> Tensor:
    """A frame, uint8 `[h, w, 3]`, as float32 `[3, H, W]` in [-1, 1]: resized (bilinear, antialiased) and cropped."""
    height, width = frame.shape[:2]
    image = torch.from_numpy(np.ascontiguousarray(frame)).permute(2, 0, 1)[None].float()
    size = _covering(height, width, geometry)
    if size != (height, width):
        image = functional.interpolate(image, size, mode="bilinear", antialias=True)
    top, left = (size[0] - geometry.height) // 2, (size[1] - geometry.width) // 2
    return image[0, :, top : top + geometry.height, left : left + geometry.width] / 127.5 - 1


def _frames(row: Row, geometry: Geometry) -> Iterator[media.Pixels]:
    if row.kind == "image":
        return iter([media.read_image(row.path)])
    return media.read_window(row.path, geometry.num_frames, geometry.frame_stride)


def _covering(height: int, width: int, geometry: Geometry) -> tuple[int, int]:
    """The size that a picture is resized to before what is over is cut off."""
    if geometry.crop == "none":
        return geometry.height, geometry.width
    scale = max(geometry.height / height, geometry.width / width)
    return max(geometry.height, round(height * scale)), max(geometry.width, round(width * scale))
