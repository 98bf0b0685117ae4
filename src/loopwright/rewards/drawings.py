"""Which of a fixed list of drawings a clip shows, as the probability of the one asked for.

    score = Drawings("sprites.npz")     # images uint8 [N, S, S, 4] RGBA, names [N]
    score([Sample("a fox moving left", frames, {"object": "fox"})])

A closed vocabulary: every clip is taken to show one of the list, and the score says how much nearer it is to the one
asked for than to the others. It knows nothing of words; what is not on the list is an error. The object's square is
compared with each drawing on the clip's own background, softmax over the mean squared differences of colours.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from ..errors import RequestError
from .facts import fact
from .reward import Sample
from .segment import Scene

SIDE = 24  # pixels that squares are scaled to
SHARPNESS = 200.0  # of the softmax: a difference of 0.005 counts as much as a factor of e
_PICKED = 3  # frames that are looked at


class Drawings:
    """A reward: the fact "object" is the name of a drawing in the file. Raises RequestError for other names."""

    def __init__(self, sprites: str) -> None:
        try:
            archive = np.load(Path(sprites).expanduser(), allow_pickle=False)
            images, names = archive["images"], [str(name) for name in archive["names"]]
        except (OSError, ValueError, KeyError) as error:
            raise RequestError(
                f"{sprites} holds no drawings ({error})", remedy="give an npz of images (RGBA) and names"
            ) from error
        self._places = {name: place for place, name in enumerate(names)}
        self._templates = torch.stack([_template(image) for image in images])

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        """A probability a sample; 0 where no object is seen."""
        places = [self._place(name) for name in self.wanted(samples)]
        return [self._probability(Scene(s.frames), place) for s, place in zip(samples, places, strict=True)]

    @staticmethod
    def wanted(samples: Sequence[Sample]) -> list[str]:
        """The objects asked for. Raises RequestError."""
        return [fact(sample, "object") for sample in samples]

    def _place(self, name: str) -> int:
        if name not in self._places:
            raise RequestError("no drawing of that name", value=name, choices=self._places)
        return self._places[name]

    @torch.no_grad()
    def _probability(self, scene: Scene, place: int) -> float:
        """Over the frames in which the object is largest, the first among equals: it may turn."""
        if scene.empty:
            return 0.0
        colour = scene.colour.view(1, 3, 1, 1)
        templates = self._templates[:, :3] + (1 - self._templates[:, 3:]) * colour
        picked = (scene.area / scene.area.max() * 20).round().sort(descending=True, stable=True).indices[:_PICKED]
        nearest = torch.stack([_differences(_square(scene, int(frame)), templates) for frame in picked]).amin(dim=0)
        return float((-SHARPNESS * nearest).softmax(dim=0)[place])


def _square(scene: Scene, frame: int) -> torch.Tensor:
    """The object's square and a pixel around it: [3, SIDE + 2, SIDE + 2]."""
    seen = _scaled(scene.pixels[frame], scene.square(frame))
    return functional.pad(seen[None], (1, 1, 1, 1), mode="replicate")[0]


def _differences(seen: torch.Tensor, templates: torch.Tensor) -> torch.Tensor:
    """Mean squared difference to each template, at the best shift by a pixel: [N]."""
    shifts = [seen[:, down : down + SIDE, across : across + SIDE] for down in range(3) for across in range(3)]
    apart = torch.cdist(torch.stack(shifts).flatten(1), templates.flatten(1)).square()
    return apart.amin(dim=0) / shifts[0].numel()


def _template(image: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> torch.Tensor:
    """A drawing as a clip's object is seen: premultiplied RGBA [4, SIDE, SIDE] in 0..1."""
    rgba = torch.from_numpy(image).permute(2, 0, 1).float() / 255
    picture = torch.cat([rgba[:3] * rgba[3:], rgba[3:]])
    rows, columns = ((rgba[3] > 0.5).any(dim=axis).nonzero().flatten() for axis in (1, 0))
    if len(rows) == 0:
        raise RequestError("a drawing is empty", remedy="leave it out")
    top, bottom, left, right = int(rows[0]), int(rows[-1]) + 1, int(columns[0]), int(columns[-1]) + 1
    side = max(bottom - top, right - left)
    margin = 2 * side / 32  # what a pixel to spare is at the size that objects have in clips
    return _scaled(picture, ((left + right) / 2, (top + bottom) / 2, side + margin))


def _scaled(picture: torch.Tensor, square: tuple[float, float, float]) -> torch.Tensor:
    """The square (centre, side) of a picture [C, H, W], scaled: [C, SIDE, SIDE]."""
    (x, y, side), (height, width) = square, picture.shape[-2:]
    theta = torch.tensor([[[side / width, 0, x / width * 2 - 1], [0, side / height, y / height * 2 - 1]]])
    grid = functional.affine_grid(theta, [1, len(picture), 2 * SIDE, 2 * SIDE], align_corners=False)
    sampled = functional.grid_sample(picture[None], grid, padding_mode="border", align_corners=False)
    return functional.avg_pool2d(sampled, 2)[0]
