"""Frames of a video stream, upright, in the order of showing.

    frames, rate = read(file)             # all of them
    upright(next(decoded(file)))          # the first alone

What is passed over costs no conversion to RGB. Animated GIF and WebP are `image`'s.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import av
import numpy as np
from av.sidedata.sidedata import Type as SideDataType
from av.stream import Disposition

from ..errors import MediaError
from .pixels import Pixels

_HIDES_FRAMES = ("vp8", "libvpx")


def read(file: Path) -> tuple[Pixels, float]:
    """Every frame `[T,H,W,3]`, and the mean frames per second."""
    with _opened(file) as (_, stream):
        rate = stream.average_rate or stream.guessed_rate
    frames = [upright(frame) for frame in decoded(file)]
    if not frames or not rate:
        raise MediaError("no frames in the video", value=str(file), remedy="it may be truncated")
    return np.stack(frames), float(rate)


@contextmanager
def _opened(file: Path) -> Iterator[tuple[av.container.InputContainer, av.VideoStream]]:
    """The container and its video, known to be whole as far as its index goes."""
    with av.open(str(file), metadata_errors="replace") as container:
        # A song's cover is a video stream to the container, but not a video.
        streams = [s for s in container.streams.video if not s.disposition & Disposition.attached_pic]
        if not streams:
            raise MediaError("no video in the file", value=str(file), remedy="give a file with a video stream")
        _refuse_truncated(file, streams[0])
        yield container, streams[0]


def decoded(file: Path) -> Iterator[av.VideoFrame]:
    """Every frame in the order of showing. Raises MediaError where the file breaks off."""
    with _opened(file) as (container, stream):
        stream.thread_type = "AUTO"
        for packet in container.demux(stream):
            yield from _decode(file, packet)


def count(file: Path) -> int:
    """The frames that a decoder will show, without decoding: the packets that hold one and are not to be thrown away.

    VP8 keeps frames that are never shown in packets of their own, which only its decoder tells from the others.
    """
    with _opened(file) as (container, stream):
        if stream.codec_context.name in _HIDES_FRAMES:
            return sum(len(_decode(file, packet)) for packet in container.demux(stream))
        return sum(1 for packet in container.demux(stream) if packet.size and not packet.is_discard)


def _refuse_truncated(file: Path, stream: av.VideoStream) -> None:
    """With its index in front, a cut file decodes happily until it ends; the index tells where it should have."""
    end = max((entry.pos + entry.size for entry in stream.index_entries), default=0)
    size = file.stat().st_size
    if end > size:
        raise MediaError(f"{file} is truncated", value=f"{size} of {end} bytes", remedy="copy or download it again")


def _decode(file: Path, packet: "av.Packet[av.VideoStream]") -> list[av.VideoFrame]:
    if packet.is_corrupt:
        raise MediaError(f"{file} is truncated or damaged", remedy="copy or download it again")
    frames: list[av.VideoFrame] = packet.decode()
    return frames


def upright(frame: av.VideoFrame) -> Pixels:
    """The pixels as a player shows them. A matrix maps (x, y) to (a x + c y, b x + d y), y down, by quarter turns."""
    pixels: Pixels = frame.to_ndarray(format="rgb24")
    for side in frame.side_data:
        if side.type == SideDataType.DISPLAYMATRIX:
            a, b, _, c, d = np.frombuffer(bytes(side), np.int32)[:5].tolist()
            swapped = abs(b) > abs(a)
            right, down = (c, b) if swapped else (a, d)
            pixels = pixels.swapaxes(0, 1) if swapped else pixels
            pixels = pixels[:: -1 if down < 0 else 1, :: -1 if right < 0 else 1]
    return np.ascontiguousarray(pixels)
