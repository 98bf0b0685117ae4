"""One object in front of a plain background: which pixels are its own, where it is, how large.

    scene = Scene(sample.frames)        # uint8 [T, H, W, 3]
    scene.colour, scene.x, scene.y, scene.area

The background is the median colour of the border, and the object whatever differs from it. Deliberately absent: several
objects, and backgrounds that are not plain.
"""

from functools import cached_property

import torch
from torch.nn import functional

_BORDER = 2  # pixels
_DISTANCE, _CROWD = 0.14, 0.4  # of colours in 0..1; of a pixel's neighbourhood, below which it is a speck
_LEAST, _SIDE = 12, 128  # pixels of an object, of the longer side that is looked at


class Scene:
    """A clip's frames in 0..1, made no larger than is needed (`pixels` [T, 3, H, W]), and what is seen in them."""

    def __init__(self, frames: torch.Tensor) -> None:
        pixels, side = frames.permute(0, 3, 1, 2).float() / 255, max(frames.shape[1:3])
        if side > _SIDE:
            pixels = functional.interpolate(pixels, scale_factor=_SIDE / side, mode="area")
        self.pixels = pixels
        self.height, self.width = self.pixels.shape[-2:]

    @cached_property
    def colour(self) -> torch.Tensor:
        """The background's colour over all frames: [3]."""
        border = torch.zeros(self.height, self.width, dtype=torch.bool)
        border[:_BORDER], border[-_BORDER:], border[:, :_BORDER], border[:, -_BORDER:] = True, True, True, True
        return self.pixels[..., border].transpose(0, 1).flatten(1).median(dim=1).values

    @cached_property
    def mask(self) -> torch.Tensor:
        """The object's pixels, without lone specks: float [T, H, W]."""
        distance = (self.pixels - self.colour[:, None, None]).square().sum(dim=1).sqrt()
        mask = (distance > _DISTANCE).float()
        return mask * (functional.avg_pool2d(mask[:, None], 3, 1, 1)[:, 0] > _CROWD)

    @cached_property
    def area(self) -> torch.Tensor:
        """Pixels of the object in each frame: [T]."""
        return self.mask.sum(dim=(1, 2))

    @cached_property
    def x(self) -> torch.Tensor:
        """The object's centre in each frame, in pixels from the left: [T]."""
        across = torch.arange(self.width) + 0.5
        return (self.mask.sum(dim=1) * across).sum(dim=1) / self.area.clamp_min(1)

    @cached_property
    def y(self) -> torch.Tensor:
        """The object's centre in each frame, in pixels from the top: [T]."""
        down = torch.arange(self.height) + 0.5
        return (self.mask.sum(dim=2) * down).sum(dim=1) / self.area.clamp_min(1)

    @property
    def empty(self) -> bool:
        """Whether some frame shows no object."""
        return bool(self.area.min() < _LEAST)

    def square(self, frame: int) -> tuple[float, float, float]:
        """Centre and side of the square around the object in a frame, with a pixel to spare."""
        rows, columns = (self.mask[frame].amax(dim=axis).nonzero().flatten() for axis in (1, 0))
        if len(rows) == 0:
            return self.width / 2, self.height / 2, float(max(self.width, self.height))
        top, bottom, left, right = int(rows[0]), int(rows[-1]) + 1, int(columns[0]), int(columns[-1]) + 1
        return (left + right) / 2, (top + bottom) / 2, max(bottom - top, right - left) + 2.0
