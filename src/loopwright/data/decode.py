"""From a row to the pixels that an encoder sees.

    pixels(row, Geometry(480, 832, 81))      # float32 [3, 81, 480, 832] in [-1, 1]
    first_frame(row, Geometry(480, 832, 81)) # the first of them as a request has its image, uint8 [480, 832, 3]

Frames are resized one by one as they are decoded, in float32, so that a long 4K clip never lies in memory as a whole.
Deliberately absent: which geometry a row gets, which is `buckets`'.
"""

import functools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from .. import media
from ..errors import DataError, MediaError
from .geometry import Geometry
from .row import Kind, Media


def measure(shown: Media) -> media.Extent:
    """Height, width and frames of a row's media as it is shown, looked up once for each state of a file.

    Raises DataError for what cannot be read.
    """
    try:
        status = shown.path.stat()
        return _extent(shown.path, shown.kind, status.st_mtime_ns, status.st_size)
    except MediaError as error:
        raise DataError(shown.where, str(error)) from error
    except OSError as error:
        raise DataError(shown.where, f"cannot read {shown.path} ({error.strerror or error})") from error


@functools.cache
def _extent(path: Path, kind: Kind, modified: int, size: int) -> media.Extent:
    """`modified` and `size` are part of what is remembered, and nothing else."""
    return media.measure_image(path) if kind == "image" else media.measure_video(path)


def pixels(shown: Media, geometry: Geometry) -> Tensor:
    """A row's media as float32 `[3, T, H, W]` in [-1, 1]; T is `geometry.num_frames`, and 1 for an image.

    Of a video, the window of `geometry.span` frames in its middle. EXIF orientation, rotation and mirroring are
    undone; covers are no video. Raises DataError for media that cannot be read or are too short.
    """
    try:
        return torch.stack([fitted(frame, geometry) for frame in _frames(shown, geometry)], dim=1)
    except MediaError as error:
        raise DataError(shown.where, str(error)) from error


def first_frame(shown: Media, geometry: Geometry) -> media.Pixels:
    """The first frame of `pixels`, rounded to uint8 `[H, W, 3]`. Raises DataError as `pixels` does."""
    try:
        frame = fitted(next(_frames(shown, geometry)), geometry)
    except MediaError as error:
        raise DataError(shown.where, str(error)) from error
    rounded = ((frame + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    return rounded.permute(1, 2, 0).contiguous().numpy()


def fitted(frame: media.Pixels, geometry: Geometry) -> Tensor:
    """A frame, uint8 `[h, w, 3]`, as float32 `[3, H, W]` in [-1, 1]: resized (bilinear, antialiased) and cropped."""
    height, width = frame.shape[:2]
    image = torch.from_numpy(np.ascontiguousarray(frame)).permute(2, 0, 1)[None].float()
    size = _covering(height, width, geometry)
    if size != (height, width):
        image = functional.interpolate(image, size, mode="bilinear", antialias=True)
    top, left = (size[0] - geometry.height) // 2, (size[1] - geometry.width) // 2
    return image[0, :, top : top + geometry.height, left : left + geometry.width] / 127.5 - 1


def _frames(shown: Media, geometry: Geometry) -> Iterator[media.Pixels]:
    if shown.kind == "image":
        return iter([media.read_image(shown.path)])
    return media.read_window(shown.path, geometry.num_frames, geometry.frame_stride)


def _covering(height: int, width: int, geometry: Geometry) -> tuple[int, int]:
    """The size that a picture is resized to before what is over is cut off."""
    if geometry.crop == "none":
        return geometry.height, geometry.width
    scale = max(geometry.height / height, geometry.width / width)
    return max(geometry.height, round(height * scale)), max(geometry.width, round(width * scale))
