"""Which of the allowed shapes a row is trained at.

    allowed = parse(["480x832x81", "480x832x17", "832x480x81"])
    choose(row, allowed)         # the nearest aspect, then the longest that the video fills

Batches hold one shape, so a run over pictures and films of any size needs a list of shapes. An image takes the first
frame's shape of whatever bucket it is nearest to, so that no bucket of one frame has to be listed for images.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from .. import media
from ..errors import DataError
from .decode import measure
from .geometry import Geometry
from .row import Row


def choose(row: Row, allowed: Sequence[Geometry]) -> Geometry:
    """The shape for a row. Raises DataError for media that cannot be read, or too short for every bucket of its aspect.

    Reads the size of the media and, of videos, their length, except where the one shape allowed decides already.
    """
    if len(allowed) == 1:
        return _for(row, allowed)[0]
    return nearest(row, measure(row), allowed)


def nearest(row: Row, extent: media.Extent, allowed: Sequence[Geometry]) -> Geometry:
    """The shape for a row whose media has this extent.

    Equal in aspect and length, the largest that needs no enlarging wins, or the smallest if all do.
    """
    assert allowed, "no buckets"
    shapes = _for(row, allowed)
    closest = min(_distance(shape, extent) for shape in shapes)
    alike = [shape for shape in shapes if _distance(shape, extent) <= closest + 1e-9]
    filled = [shape for shape in alike if shape.span <= extent.frames]
    if not filled:
        needed = min(shape.span for shape in alike)
        raise DataError(row.where, f"{row.path} is too short", value=f"{extent.frames} frames", remedy=_needs(needed))
    return max(filled, key=lambda shape: (shape.span, *_quality(shape, extent)))


def _quality(shape: Geometry, extent: media.Extent) -> tuple[bool, int]:
    enlarges = shape.height > extent.height or shape.width > extent.width
    area = shape.height * shape.width
    return not enlarges, -area if enlarges else area


def _distance(shape: Geometry, extent: media.Extent) -> float:
    """Between two aspects, the same for twice as wide and twice as high."""
    return abs(math.log(shape.width * extent.height / (shape.height * extent.width)))


def _for(row: Row, allowed: Sequence[Geometry]) -> list[Geometry]:
    """The shapes as this row could have them; of one frame the stride means nothing, so it is 1 in all."""
    return [
        replace(shape, num_frames=1, frame_stride=1) if row.kind == "image" or shape.num_frames == 1 else shape
        for shape in allowed
    ]


def _needs(frames: int) -> str:
    return f"{frames} are needed at least"
