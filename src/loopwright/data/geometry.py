"""The shape of training pixels, and how a picture of another shape is brought to it.

    Geometry(480, 832, 81, frame_stride=2).span        # 161: the frames that a video must have
    parse("480x832x81")                                # the same shape from a command line

Deliberately absent: frames per second. A stride takes every n-th frame of whatever rate a video has.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields

from ..errors import RequestError

CROPS = ("center", "none")


@dataclass(frozen=True, slots=True)
class Geometry:
    """Height and width in pixels, frames, and the step from one frame taken to the next.

    `crop` "center" keeps proportions and cuts what is left over, the same on both sides; "none" keeps the whole picture
    and stretches it.
    """

    height: int
    width: int
    num_frames: int
    frame_stride: int = 1
    crop: str = "center"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and value < 1:
                raise RequestError(f"{field.name} must be at least 1", value=value)
        if self.crop not in CROPS:
            raise RequestError("unknown crop", value=self.crop, choices=CROPS)

    @property
    def span(self) -> int:
        """The frames from the first taken to the last, both counted."""
        return (self.num_frames - 1) * self.frame_stride + 1


def parse(texts: Sequence[str], frame_stride: int = 1, crop: str = "center") -> tuple[Geometry, ...]:
    """Buckets from texts such as "480x832x81": height, width, frames. Raises RequestError for any other text."""
    found = []
    for text in texts:
        match = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text.strip().lower())
        if match is None:
            raise RequestError("not a bucket", value=text, remedy="write HEIGHTxWIDTHxFRAMES, such as 480x832x81")
        height, width, num_frames = map(int, match.groups())
        found.append(Geometry(height, width, num_frames, frame_stride, crop))
    return tuple(found)
