"""Compose the training clips of tiny-wan: one object, one motion, one plain background, and a caption.

    objects = Objects.load("sprites.npz", "cuda")
    video, coverage = compose_clips(scenes(objects, triples, words), generator)

A clip is 9 frames of 64x64 in [-1, 1]. Everything is drawn from tensors on one device, so that a training loop can
compose its batches as fast as it consumes them. An object is a sprite, a digit or a word of three to five letters,
which is at index -1. About 5 % of the (object, motion, background) triples, chosen by a hash, and some words are never
composed for training; they are what `evaluate.py` asks for.
"""

import hashlib
import math
import random
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import lettering
import numpy as np
import torch
import torch.nn.functional as F

from loopwright.rewards.tracking import PALETTE

FRAMES = 9
SIZE = 64
HELD_OUT_SHARE = 0.05
GRID = 8  # Pixels; the side of one latent.
SMALL, LARGE = 26.0, 34.0  # Sides of a sprite that keeps its size.
WORD = SIZE * GRID / lettering.WIDTH  # The side of a word's picture when a letter is as wide as a cell.
HOP = 20.0
TURN = 30  # degrees a frame

MOTIONS: tuple[str, ...] = ("left", "right", "up", "down", "growing", "shrinking", "spinning", "bouncing", "still")

# Tones that Noto's drawings seldom fill an area with, so that a sprite stands out from its background.
BACKGROUNDS = PALETTE

MOTION_PHRASES: dict[str, tuple[str, ...]] = {
    "left": ("moving left", "moving to the left", "sliding left", "going left"),
    "right": ("moving right", "moving to the right", "sliding right", "going right"),
    "up": ("moving up", "moving upwards", "rising", "going up"),
    "down": ("moving down", "moving downwards", "falling", "going down"),
    "growing": ("growing", "getting bigger", "becoming larger", "growing bigger"),
    "shrinking": ("shrinking", "getting smaller", "becoming smaller", "shrinking away"),
    "spinning": ("spinning", "rotating", "turning around", "spinning around"),
    "bouncing": ("bouncing", "jumping", "hopping", "bouncing up and down"),
    "still": ("standing still", "staying still", "not moving", "keeping still"),
}

CANONICAL = "{obj} {motion} on {bg} background"
PARAPHRASES: tuple[str, ...] = (
    "{obj} is {motion} on {bg} background",
    "{obj} {motion}, {bg_plain} background",
    "a video of {obj} {motion} on {bg} background",
    "{obj_plain} {motion} on {bg_plain}",
    "on {bg} background, {obj} {motion}",
    "{obj} {motion} in front of {bg} background",
)
STILL_IMAGE: tuple[str, ...] = (
    "{obj} on {bg} background",
    "{obj}, {bg_plain} background",
    "a picture of {obj} on {bg} background",
    "{obj_plain} on {bg_plain}",
)
WITHOUT_BACKGROUND = "{obj} {motion}"


@dataclass(frozen=True)
class Objects:
    """All that a clip can show but words: sprites, then digits.

    Attributes:
        images: premultiplied RGBA [N, 4, 64, 64] in [0, 1]; of what is drawn in ink, the coverage alone.
        names: how a caption calls them.
        inked: [N], whether an object has the ink of its background and no colours of its own.
        glyphs: the letters of words.
    """

    images: torch.Tensor
    names: list[str]
    inked: torch.Tensor
    glyphs: torch.Tensor

    @classmethod
    def load(cls, path: Path | str, device: torch.device | str = "cpu") -> "Objects":
        """From what `sprites.py` wrote."""
        archive = np.load(path)
        rgba = torch.from_numpy(archive["images"]).to(device).permute(0, 3, 1, 2).float() / 255
        sprites = torch.cat([rgba[:, :3] * rgba[:, 3:], rgba[:, 3:]], dim=1)
        digits = F.pad(lettering.digits(device), (0, 0, 0, 0, 3, 0))
        names = [*map(str, archive["names"]), *(f"the digit {digit}" for digit in lettering.DIGITS)]
        inked = torch.arange(len(names), device=device) >= len(sprites)
        return cls(torch.cat([sprites, digits]), names, inked, lettering.glyphs(device))


@dataclass(frozen=True)
class Scenes:
    """What clips show: rows on dim 0, `pictures` as `Objects.images`, the others indices or flags.

    `odd` are words of an odd number of letters.
    """

    pictures: torch.Tensor
    inked: torch.Tensor
    wide: torch.Tensor
    odd: torch.Tensor
    motions: torch.Tensor
    backgrounds: torch.Tensor

    def __len__(self) -> int:
        return len(self.motions)


def scenes(objects: Objects, triples: torch.Tensor, words: torch.Tensor | None = None) -> Scenes:
    """Of triples (object, motion, background) [N, 3]; where the object is below 0, of the word in `words` [N, 5]."""
    which, motions, backgrounds = triples.unbind(dim=1)
    wide, odd = which < 0, torch.zeros_like(which, dtype=torch.bool)
    pictures, inked = objects.images[which.clamp(min=0)], objects.inked[which.clamp(min=0)] | wide
    if words is not None:
        spelled = F.pad(lettering.spelled(objects.glyphs, words), (0, 0, 0, 0, 3, 0))
        pictures = torch.where(wide[:, None, None, None], spelled, pictures)
        odd = wide & ((words != lettering.NOTHING).sum(dim=1) % 2 == 1)
    return Scenes(pictures, inked, wide, odd, motions, backgrounds)


def sprite_names(path: Path | str) -> list[str]:
    """The names of the sprites alone."""
    return [str(name) for name in np.load(path)["names"]]


@cache  # a table that is made anew each time makes the host wait for the device
def background_table(device: torch.device | str = "cpu") -> torch.Tensor:
    """Background colours in [0, 1], in the order of BACKGROUNDS."""
    return torch.tensor(list(BACKGROUNDS.values()), device=device, dtype=torch.float32) / 255


@cache
def ink_table(device: torch.device | str = "cpu") -> torch.Tensor:
    """The ink of words and digits on each background: black or white, whichever differs more."""
    light = background_table(device).mean(dim=1, keepdim=True) > 0.45
    return torch.where(light, 0.0, 1.0).expand(-1, 3)


# Names that take no article.
PLURALS: frozenset[str] = frozenset(
    name.strip()
    for name in """
    bacon; ballet shoes; blueberries; books; bowling; bread; broccoli; cherries; fries; garlic; gloves; goggles;
    grapes; green salad; jeans; nesting dolls; pancakes; paw prints; popcorn; shopping bags; shorts; socks;
    spaghetti; sushi
    """.split(";")  # noqa: SIM905
)


def with_article(noun: str) -> str:
    """The noun with the article an English speaker would use."""
    if noun in PLURALS or noun.startswith("the "):
        return noun
    vowel = noun[0] in "aeio" or (noun[0] == "u" and not noun.startswith(("uni", "use")))
    return f"{'an' if vowel else 'a'} {noun}"


def caption(name: str, motion: str, background: str, rng: random.Random | None = None) -> str:
    """The canonical caption, or with a generator one of the ways a person might put it."""
    fields = {
        "obj": with_article(name),
        "obj_plain": name,
        "motion": MOTION_PHRASES[motion][0],
        "bg": with_article(background),
        "bg_plain": background,
    }
    if rng is None:
        return CANONICAL.format(**fields)
    if rng.random() < 0.4:
        fields["motion"] = rng.choice(MOTION_PHRASES[motion])
    template = CANONICAL if rng.random() < 0.5 else rng.choice(PARAPHRASES)
    if rng.random() < 0.03:
        template = WITHOUT_BACKGROUND
    return _dressed(template.format(**fields), rng)


def image_caption(name: str, background: str, rng: random.Random) -> str:
    """A caption for a single frame, which cannot show a motion."""
    fields = {
        "obj": with_article(name),
        "obj_plain": name,
        "bg": with_article(background),
        "bg_plain": background,
    }
    return _dressed(rng.choice(STILL_IMAGE).format(**fields), rng)


def _dressed(text: str, rng: random.Random) -> str:
    """Sometimes capitalised, sometimes with a full stop, as people type."""
    if rng.random() < 0.15:
        text = text[0].upper() + text[1:]
    if rng.random() < 0.1:
        text += "."
    return text


def quoted(word: str) -> str:
    """How a caption names a word."""
    return f'the word "{word}"'


def is_held_out(name: str, motion: str, background: str) -> bool:
    """Whether this combination is kept away from training."""
    digest = hashlib.sha256(f"{name}|{motion}|{background}".encode()).digest()
    return int.from_bytes(digest[:4], "big") < HELD_OUT_SHARE * 2**32


def split_triples(names: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Index triples (object, motion, background) for training, and those held out."""
    training: list[tuple[int, int, int]] = []
    held_out: list[tuple[int, int, int]] = []
    for i, name in enumerate(names):
        for j, motion in enumerate(MOTIONS):
            for k, background in enumerate(BACKGROUNDS):
                (held_out if is_held_out(name, motion, background) else training).append((i, j, k))
    return torch.tensor(training), torch.tensor(held_out)


@dataclass
class Track:
    """Where the sprite is in every frame: centre and size in pixels, turn in radians; each (batch, FRAMES)."""

    x: torch.Tensor
    y: torch.Tensor
    size: torch.Tensor
    angle: torch.Tensor


def sample_tracks(motions: torch.Tensor, wide: torch.Tensor, generator: torch.Generator | None = None) -> Track:
    """Random tracks for a batch of motion indices; `wide` says which are of words.

    Centres lie on multiples of GRID pixels at the first frame, and sizes and speeds come from short lists: a drawing
    then meets the autoencoder's 8-pixel cells in few ways, which a small transformer can learn to render crisply in
    minutes. With positions and sizes drawn from intervals it had learnt motions and colours but no shapes by then.
    Words have one size, at which a letter is as wide as a cell, but for what grows and shrinks.
    """
    device = motions.device
    batch = motions.shape[0]

    def chance() -> torch.Tensor:
        return torch.rand(batch, 1, device=device, generator=generator)

    def chosen(name: str) -> torch.Tensor:
        return (motions == MOTIONS.index(name)).unsqueeze(1)

    def centre(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        """A multiple of GRID between two multiples."""
        steps = ((high - low) / GRID).round() + 1
        return low + GRID * (chance() * steps).floor().clamp(max=steps - 1)

    def constant(value: float) -> torch.Tensor:
        return torch.full((batch, 1), value, device=device)

    time = torch.linspace(0, 1, FRAMES, device=device).unsqueeze(0)
    is_wide = wide.unsqueeze(1)
    is_large = (chance() < 0.5) | is_wide
    size = torch.where(is_large, LARGE, SMALL) * torch.ones_like(time)
    travel = torch.where(is_large, 16.0, 32.0)  # Large sprites have less room, and move at half the speed.
    size = torch.where(chosen("spinning"), torch.full_like(size, 30.0), size)
    size = torch.where(chosen("bouncing"), torch.full_like(size, SMALL), size)
    size = torch.where(is_wide, WORD, size)
    size = torch.where(chosen("growing") & is_wide, WORD * (0.5 + time), size)
    size = torch.where(chosen("shrinking") & is_wide, WORD * (1.5 - time), size)
    size = torch.where(chosen("growing") & ~is_wide, 16 + 24 * time, size)
    size = torch.where(chosen("shrinking") & ~is_wide, 40 - 24 * time, size)

    needs_room = is_large | chosen("spinning") | chosen("growing") | chosen("shrinking")
    needs_room &= ~chosen("bouncing") | is_wide
    low = torch.where(needs_room, constant(24), constant(16))
    low = torch.where(is_wide & (chosen("growing") | chosen("shrinking")), constant(32), low)
    high = SIZE - low
    start = centre(low, high - travel)
    forward, backward = start + travel * time, start + travel * (1 - time)
    x = centre(low, high).expand(-1, FRAMES)
    x = torch.where(chosen("right"), forward, torch.where(chosen("left"), backward, x))
    y = centre(low, high).expand(-1, FRAMES)
    y = torch.where(chosen("down"), forward, torch.where(chosen("up"), backward, y))
    hop = HOP * (2 * math.pi * time).sin().abs()
    y = torch.where(chosen("bouncing"), centre(constant(40), constant(48)) - hop, y)
    turn = math.radians(TURN) * (FRAMES - 1) * time
    angle = torch.where(chosen("spinning"), turn, torch.zeros_like(x))
    return Track(x, y, size, angle)


def draw(
    sprites: torch.Tensor,
    colours: torch.Tensor,
    x: torch.Tensor,
    y: torch.Tensor,
    size: torch.Tensor,
    angle: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw premultiplied RGBA `sprites` over plain `colours`; all arguments share the first dimension.

    Returns the pictures in [0, 1], (batch, 3, SIZE, SIZE), and the coverage, (batch, 1, SIZE, SIZE).
    """
    centre_x, centre_y = x / SIZE * 2 - 1, y / SIZE * 2 - 1
    scale = SIZE / size
    cos, sin = angle.cos() * scale, angle.sin() * scale
    theta = torch.stack(
        [
            torch.stack([cos, sin, -(cos * centre_x + sin * centre_y)], dim=-1),
            torch.stack([-sin, cos, sin * centre_x - cos * centre_y], dim=-1),
        ],
        dim=1,
    )
    # Sample at twice the resolution and average: plain bilinear sampling would alias on small sprites.
    grid = F.affine_grid(theta, [len(sprites), 4, 2 * SIZE, 2 * SIZE], align_corners=False)
    drawn = F.avg_pool2d(F.grid_sample(sprites, grid, align_corners=False), 2)
    alpha = drawn[:, 3:].clamp(0, 1)
    picture = (drawn[:, :3] + (1 - alpha) * colours[:, :, None, None]).clamp(0, 1)
    return picture, alpha


def compose_clips(what: Scenes, generator: torch.Generator | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Clips: video in [-1, 1], (batch, 3, FRAMES, SIZE, SIZE), and the object's coverage (batch, 1, ...)."""
    track = _placed(what, generator)
    at = [part.flatten() for part in (track.x, track.y, track.size, track.angle)]
    picture, alpha = draw(*(part.repeat_interleave(FRAMES, dim=0) for part in _painted(what)), *at)
    picture, alpha = (part.unflatten(0, (len(what), FRAMES)).transpose(1, 2) for part in (picture, alpha))
    return picture * 2 - 1, alpha


def compose_frames(what: Scenes, generator: torch.Generator | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """One random frame of each clip, shaped as one-frame videos."""
    track = _placed(what, generator)
    pick = torch.randint(FRAMES, (len(what), 1), device=what.motions.device, generator=generator)
    at = [part.gather(1, pick).squeeze(1) for part in (track.x, track.y, track.size, track.angle)]
    picture, alpha = draw(*_painted(what), *at)
    return (picture * 2 - 1).unsqueeze(2), alpha.unsqueeze(2)


def _placed(what: Scenes, generator: torch.Generator | None) -> Track:
    """Where things are. A word begins at a multiple of GRID, so that no letter lies in two cells: its middle does not
    if its letters are of an odd number, and goes half a letter aside, where there is more room."""
    track = sample_tracks(what.motions, what.wide, generator)
    aside = torch.where(track.x[:, :1] <= SIZE / 2, GRID / 2, -GRID / 2) * what.odd.unsqueeze(1)
    return replace(track, x=track.x + aside)


def _painted(what: Scenes) -> tuple[torch.Tensor, torch.Tensor]:
    """Premultiplied pictures with their ink, and the colours behind them."""
    device = what.motions.device
    ink = ink_table(device)[what.backgrounds][:, :, None, None] * what.pictures[:, 3:]
    colours = torch.where(what.inked[:, None, None, None], ink, what.pictures[:, :3])
    return torch.cat([colours, what.pictures[:, 3:]], dim=1), background_table(device)[what.backgrounds]
