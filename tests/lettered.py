"""Pictures for rewards: words in a font, and samples of them."""

import numpy as np
import torch
from matplotlib import font_manager
from PIL import Image, ImageDraw, ImageFont

from loopwright.rewards import Sample

MONO = "DejaVu Sans Mono"


def word(said: str, *, font: str = MONO, size: int = 18, noise: float = 0.0, seed: int = 0) -> np.ndarray:
    """White on blue, uint8 [64, 64, 3], with noise of that deviation."""
    image = Image.new("RGB", (64, 64), (20, 60, 180))
    path = font_manager.findfont(font_manager.FontProperties(font, weight="bold"), fallback_to_default=False)
    ImageDraw.Draw(image).text((32, 32), said, font=ImageFont.truetype(path, size), fill="white", anchor="mm")
    pixels = np.asarray(image) / 255 + noise * np.random.default_rng(seed).standard_normal((64, 64, 3))
    return (pixels.clip(0, 1) * 255).round().astype(np.uint8)


def sample(prompt: str, *frames: np.ndarray, **facts: str) -> Sample:
    """A sample of these frames."""
    return Sample(prompt, torch.from_numpy(np.stack(frames)), facts)
