"""Reads and writes images and videos, and keeps in each file how it was made.

    frames, fps = read_video("fox.mp4")                                # uint8 [T,H,W,3]
    write("copy.webp", frames, fps=fps, metadata={"prompt": "a fox"})
    read_metadata("copy.webp")["prompt"]

Pixels are numpy uint8, RGB, `[T,H,W,3]` for a video and `[H,W,3]` for an image. The metadata is one JSON text in the
place each format keeps for comments, so an MP4 carries its prompt wherever it is copied. Deliberately absent: sound,
torch, resizing, and any lossless MP4 (use .webp or .png for exact pixels).
"""

from .pixels import PathLike, Pixels
from .reading import Extent, measure_image, measure_video, read_image, read_video, read_window
from .record import read_metadata
from .sheet import contact_sheet
from .writing import SUFFIXES, check_writable, write

__all__ = [
    "SUFFIXES",
    "Extent",
    "PathLike",
    "Pixels",
    "check_writable",
    "contact_sheet",
    "measure_image",
    "measure_video",
    "read_image",
    "read_metadata",
    "read_video",
    "read_window",
    "write",
]
