"""The flags of a picture's shape: the same for what is made, what is encoded and what is trained on.

FLAGS = (*SIZE, ...)                # height, width, frames: a command that makes
FLAGS = (*TRAINING, ...)            # and how films and photos of other shapes are brought to it
buckets_of(arguments)               # the shapes that the flags allow
"""

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..errors import RequestError
from .flags import Flag

if TYPE_CHECKING:
    from ..data.geometry import Geometry

_GROUP = "geometry"
_NAMES = ("height", "width", "num_frames")
SIZE = (
    Flag("height", "in pixels", int, _GROUP, "N"),
    Flag("width", "in pixels", int, _GROUP, "N"),
    Flag("num_frames", "1 makes an image", int, _GROUP, "N"),
)
TRAINING = (
    *SIZE,
    Flag("frame_stride", "take every N-th frame of a video", int, _GROUP, "N"),
    Flag("crop", "center (the default; keeps proportions) or none (keeps all, stretched)", group=_GROUP),
    Flag(
        "bucket",
        "a shape to train at, such as 480x832x81; may be given again, and replaces height, width and num-frames",
        group=_GROUP,
        metavar="HEIGHTxWIDTHxFRAMES",
        many=True,
        instead=_NAMES,
    ),
)


def buckets_of(arguments: argparse.Namespace) -> tuple["Geometry", ...]:
    """The shapes that flags of `TRAINING` name, none if they name none. Raises RequestError for half a shape."""
    from ..data.geometry import CROPS, Geometry, parse

    given: dict[str, int] = {name: value for name in _NAMES if (value := getattr(arguments, name)) is not None}
    stride: int = 1 if arguments.frame_stride is None else arguments.frame_stride
    crop: str = arguments.crop or CROPS[0]
    Geometry(1, 1, 1, stride, crop)  # refuses either before anything is said of sizes
    if arguments.bucket and given:
        raise RequestError("two geometries", value=f"--bucket and {_flags(given)}", remedy="give one of them")
    if arguments.bucket:
        return parse(arguments.bucket, stride, crop)
    if not given and arguments.frame_stride is None and arguments.crop is None:
        return ()
    if missing := [name for name in _NAMES if name not in given]:
        raise RequestError("half a geometry", remedy=f"add {_flags(missing)}, or give --bucket")
    return (Geometry(**given, frame_stride=stride, crop=crop),)


def _flags(names: Iterable[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)
