"""Whether an object in front of a plain background moves as asked, stands where asked, on the colour asked: 0 to 1.

    Motion()([Sample("a fox moving left", frames, {"motion": "left"})])         # [0.94]

Each score grows with how much of the wanted thing there is and falls with what disturbs it, so that a group of samples
of which none is right still has a best one. Half is where a judge would begin to call it right. A clip in which no
object is seen scores 0: that is the model's failure, not the scorer's.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import torch
from PIL import ImageColor
from torch.nn import functional

from ..errors import RequestError
from .facts import fact
from .reward import Sample
from .segment import Scene

MOVE, HOP, GROWTH = 0.25, 0.28, 1.69  # of the side; of the side; of the object's side: where a score is full
SWING = 0.02  # of the side: what is too little to look for
TURNS = tuple(range(-50, 51, 5))  # degrees a frame that are tried
CHANGE, EXPLAINED = 0.03, 0.3  # of full scale; share of the change that turning must explain for a full score
NEAR = 0.2  # of colours in 0..1: a score falls to 1/e
# The backgrounds of tiny-wan; other colours are what CSS calls by their names.
PALETTE: Mapping[str, tuple[int, int, int]] = {
    "black": (14, 14, 18),
    "white": (250, 250, 250),
    "gray": (134, 134, 140),
    "red": (178, 22, 40),
    "green": (30, 112, 52),
    "blue": (34, 74, 190),
    "yellow": (250, 238, 120),
    "orange": (236, 112, 14),
    "purple": (104, 34, 140),
    "pink": (250, 176, 206),
    "teal": (0, 138, 138),
    "brown": (92, 56, 28),
}


class Motion:
    """The fact "motion": left, right, up, down, growing, shrinking, bouncing, spinning or still."""

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        """A score a sample. Raises RequestError for an unknown motion, or one asked of a single frame."""
        asked = self.wanted(samples)
        for sample, motion in zip(samples, asked, strict=True):
            if len(sample.frames) < 3:
                raise RequestError("a motion needs three frames or more", value=f"{motion} in {len(sample.frames)}")
        return [_seen(Scene(s.frames), MOTIONS[motion]) for s, motion in zip(samples, asked, strict=True)]

    @staticmethod
    def wanted(samples: Sequence[Sample]) -> list[str]:
        """The motions asked for. Raises RequestError."""
        return [_known(fact(sample, "motion"), MOTIONS, "motion") for sample in samples]


class Position:
    """The fact "position": left, right, top, bottom or centre, where the object is on average."""

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        """A score a sample: full from a quarter of the side on, 0 at the middle; at the centre the other way."""
        asked = self.wanted(samples)
        return [_seen(Scene(s.frames), POSITIONS[place]) for s, place in zip(samples, asked, strict=True)]

    @staticmethod
    def wanted(samples: Sequence[Sample]) -> list[str]:
        """The places asked for. Raises RequestError."""
        return [_known(fact(sample, "position"), POSITIONS, "position") for sample in samples]


class Colour:
    """The fact "background": a colour of `PALETTE`, by a CSS name, or as "#rrggbb"."""

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        """exp(-(d / 0.2)^2) of the distance d between wanted and seen colour in 0..1."""
        wanted = self.wanted(samples)
        seen = [Scene(sample.frames).colour for sample in samples]
        return [math.exp(-((float(torch.dist(a, b)) / NEAR) ** 2)) for a, b in zip(wanted, seen, strict=True)]

    @staticmethod
    def wanted(samples: Sequence[Sample]) -> list[torch.Tensor]:
        """The colours asked for. Raises RequestError."""
        return [colour(fact(sample, "background")) for sample in samples]


def colour(name: str) -> torch.Tensor:
    """RGB in 0..1 of a colour's name. Raises RequestError."""
    try:
        return torch.tensor(PALETTE[name] if name in PALETTE else ImageColor.getrgb(name)[:3]).float() / 255
    except ValueError as error:
        raise RequestError("unknown colour", value=name, choices=PALETTE, remedy='or "#rrggbb"') from error


def _known(name: str, table: Mapping[str, object], what: str) -> str:
    if name not in table:
        raise RequestError(f"unknown {what}", value=name, choices=table)
    return name


def _seen(scene: Scene, score: Callable[[Scene], float]) -> float:
    return 0.0 if scene.empty else score(scene)


def _share(value: float, full: float = 1.0) -> float:
    return min(max(value / full, 0.0), 1.0)


def _travel(scene: Scene) -> tuple[float, float]:
    """How far the object gets to the right and down, in sides of the picture, but for what it swings."""
    right, below = _swing(scene)
    x, y = float(scene.x[-1] - scene.x[0]) - right, float(scene.y[-1] - scene.y[0]) - below
    return x / scene.width, y / scene.height


def _swing(scene: Scene) -> tuple[float, float]:
    """How far the centre of its pixels goes round its middle, in pixels, if the object turns."""
    across, down, _ = scene.square(0)
    x, y = float(scene.x[0]) - across, float(scene.y[0]) - down
    if 2 * math.hypot(x, y) < SWING * scene.width:
        return 0.0, 0.0
    share, rate = _turning(scene)
    angle = -math.radians(rate * (len(scene.pixels) - 1))
    cos, sin = math.cos(angle), math.sin(angle)
    return share * (cos * x - sin * y - x), share * (sin * x + cos * y - y)


def _moved(across: int, down: int) -> Callable[[Scene], float]:
    """Moves in that direction, and not in the other."""

    def score(scene: Scene) -> float:
        x, y = _travel(scene)
        along, beside = x * across + y * down, abs(x * down) + abs(y * across)
        return _share(along, MOVE) * (1 - _share(beside, MOVE)) * (1 - _share(abs(_growth(scene)) - 0.5))

    return score


def _growth(scene: Scene) -> float:
    """How the object's side changes, of what is full: 1 for growing, -1 for shrinking; the logarithm of its ratio."""
    first, last = scene.area[:2].mean(), scene.area[-2:].mean()
    return math.log(math.sqrt(float(last / first))) / math.log(GROWTH)


def _staying(scene: Scene) -> float:
    """1 for an object whose ends are in the same place, 0 for one that has moved by what is full."""
    return 1 - _share(max(map(abs, _travel(scene))), MOVE)


def _bounced(scene: Scene) -> float:
    """How far it gets up and down without ending elsewhere or turning."""
    return _share(float(scene.y.max() - scene.y.min()) / scene.height, HOP) * _staying(scene) * (1 - _turned(scene))


def _still(scene: Scene) -> float:
    """Neither moves nor changes its size nor turns."""
    ranges = [float(scene.x.max() - scene.x.min()) / scene.width, float(scene.y.max() - scene.y.min()) / scene.height]
    return (1 - _share(max(ranges), MOVE)) * (1 - _share(abs(_growth(scene)))) * (1 - _turned(scene))


def _spun(scene: Scene) -> float:
    """Turns where it is."""
    return _turned(scene) * _staying(scene) * (1 - _share(abs(_growth(scene))))


def _turned(scene: Scene) -> float:
    """How much of what changes is explained by turning."""
    return _turning(scene)[0]


@lru_cache(maxsize=8)
def _turning(scene: Scene) -> tuple[float, int]:
    """How much of what changes is explained by turning the first frame at some steady rate, wherever the object is; and
    the degrees a frame that explain the most."""
    weight = scene.mask.amax(dim=0)
    weight = weight / weight.sum()
    steps = torch.arange(1, len(scene.pixels))

    def difference(rate: int) -> float:
        apart = (scene.pixels[1:] - _rotated(scene, rate * steps)).abs().mean(dim=1)
        return float((apart * weight).sum(dim=(1, 2)).mean())

    unchanged = difference(0)
    if unchanged < CHANGE / 10:
        return 0.0, 0
    left, rate = min((difference(rate), rate) for rate in TURNS if rate)
    return _share(1 - left / unchanged, EXPLAINED) * _share(unchanged, CHANGE), rate


def _rotated(scene: Scene, degrees: torch.Tensor) -> torch.Tensor:
    """The first frame's object turned by degrees [N] and brought to where the later frames have it: [N, 3, H, W]."""
    angle = degrees * math.pi / 180
    cos, sin = angle.cos(), angle.sin()
    x, y = scene.x / scene.width * 2 - 1, scene.y / scene.height * 2 - 1
    ratio = scene.height / scene.width  # coordinates are in half sides, which differ
    rows = [
        torch.stack([cos, -sin * ratio, x[0] - cos * x[1:] + sin * ratio * y[1:]], dim=-1),
        torch.stack([sin / ratio, cos, y[0] - sin / ratio * x[1:] - cos * y[1:]], dim=-1),
    ]
    size = [len(angle), 3, scene.height, scene.width]
    grid = functional.affine_grid(torch.stack(rows, dim=1), size, align_corners=False)
    first = scene.pixels[0].expand(len(angle), -1, -1, -1)
    return functional.grid_sample(first, grid, padding_mode="border", align_corners=False)


def _placed(across: int, down: int) -> Callable[[Scene], float]:
    """Towards that side."""

    def score(scene: Scene) -> float:
        x, y = _middle(scene)
        return _share(x * across + y * down, 0.25)

    return score


def _centred(scene: Scene) -> float:
    return 1 - _share(max(map(abs, _middle(scene))), 0.25)


def _middle(scene: Scene) -> tuple[float, float]:
    """How far right and below the picture's middle the object is on average, in sides."""
    return float(scene.x.mean()) / scene.width - 0.5, float(scene.y.mean()) / scene.height - 0.5


MOTIONS: Mapping[str, Callable[[Scene], float]] = {
    "left": _moved(-1, 0),
    "right": _moved(1, 0),
    "up": _moved(0, -1),
    "down": _moved(0, 1),
    "growing": lambda scene: _share(_growth(scene)) * _staying(scene),
    "shrinking": lambda scene: _share(-_growth(scene)) * _staying(scene),
    "bouncing": _bounced,
    "spinning": _spun,
    "still": _still,
}
POSITIONS: Mapping[str, Callable[[Scene], float]] = {
    "left": _placed(-1, 0),
    "right": _placed(1, 0),
    "top": _placed(0, -1),
    "bottom": _placed(0, 1),
    "centre": _centred,
}
