"""Pixels of an image, and of the kinds of image that move."""

import statistics
from pathlib import Path

import numpy as np
from PIL import Image, ImageSequence

from .opening import open_image, starts_with
from .pixels import Pixels


def is_animation(file: Path) -> bool:
    """Whether it is a GIF or WebP, moving or not."""
    return starts_with(file, b"GIF8", b"RIFF....WEBP")


def read_animation(file: Path) -> tuple[Pixels, float]:
    """Frames `[T,H,W,3]`, evenly spaced, and how many a second."""
    frames, held = [], []
    with open_image(file) as image:
        for frame in ImageSequence.Iterator(image):
            frames.append(rgb(frame))
            held.append(frame.info.get("duration", 0) or 100)  # milliseconds; browsers show zero as a tenth
    usual = statistics.median_low(held)
    repeats = [max(1, round(time / usual)) for time in held]
    return np.repeat(np.stack(frames), repeats, axis=0), _even_rate(sum(repeats), sum(held))


def rgb(image: Image.Image) -> Pixels:
    """Pixels `[H,W,3]` of an image of any mode, alpha laid on white."""
    if image.mode.startswith("I;16"):  # Pillow's own conversion would clip 16 bits to white
        return np.stack([(np.asarray(image) >> 8).astype(np.uint8)] * 3, axis=-1)
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        white.alpha_composite(image.convert("RGBA"))
        image = white
    return np.array(image.convert("RGB"))


def _even_rate(count: int, milliseconds: float) -> float:
    """Whole frames per second where the format's rounding (10 ms in GIF) leaves that open: it is what was meant."""
    rate = 1000 * count / milliseconds
    whole = max(1, round(rate))
    return float(whole) if abs(1000 * count / whole - milliseconds) < 10 else rate
