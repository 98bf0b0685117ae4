"""Compose the training clips of tiny-wan: one sprite, one motion, one plain background, and a caption.

A clip is 9 frames of 64x64 in [-1, 1]. Everything is drawn from tensors on one device, so that a training loop can
compose its batches as fast as it consumes them. About 5 % of the (sprite, motion, background) triples, chosen by
a hash, are never composed for training; they are what `evaluate.py` asks for.
"""

import hashlib
import math
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

FRAMES = 9
SIZE = 64
HELD_OUT_SHARE = 0.05
GRID = 8  # Pixels; the side of one latent.
SMALL, LARGE = 26.0, 34.0  # Sides of a sprite that keeps its size.
HOP = 20.0

MOTIONS: tuple[str, ...] = ("left", "right", "up", "down", "growing", "shrinking", "spinning", "bouncing", "still")

# Tones that Noto's drawings seldom fill an area with, so that a sprite stands out from its background.
BACKGROUNDS: dict[str, tuple[int, int, int]] = {
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
class Sprites:
    """The sprite images as premultiplied RGBA in [0, 1], and their names."""

    images: torch.Tensor
    names: list[str]

    @classmethod
    def load(cls, path: Path, device: torch.device | str = "cpu") -> "Sprites":
        archive = np.load(path)
        rgba = torch.from_numpy(archive["images"]).to(device).permute(0, 3, 1, 2).float() / 255
        return cls(torch.cat([rgba[:, :3] * rgba[:, 3:], rgba[:, 3:]], dim=1), [str(name) for name in archive["names"]])


def background_table(device: torch.device | str = "cpu") -> torch.Tensor:
    """Background colours in [0, 1], in the order of BACKGROUNDS."""
    return torch.tensor(list(BACKGROUNDS.values()), device=device, dtype=torch.float32) / 255


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
    if noun in PLURALS:
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


def is_held_out(name: str, motion: str, background: str) -> bool:
    """Whether this combination is kept away from training."""
    digest = hashlib.sha256(f"{name}|{motion}|{background}".encode()).digest()
    return int.from_bytes(digest[:4], "big") < HELD_OUT_SHARE * 2**32


def split_triples(names: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Index triples (sprite, motion, background) for training, and those held out."""
    training, held_out = [], []
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


def sample_tracks(motions: torch.Tensor, generator: torch.Generator | None = None) -> Track:
    """Random tracks for a batch of motion indices.

    Centres lie on multiples of GRID pixels at the first frame, and sizes and speeds come from short lists: a drawing
    then meets the autoencoder's 8-pixel cells in few ways, which a small transformer can learn to render crisply in
    minutes. With positions and sizes drawn from intervals it had learnt motions and colours but no shapes by then.
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
    is_large = chance() < 0.5
    size = torch.where(is_large, LARGE, SMALL) * torch.ones_like(time)
    travel = torch.where(is_large, 16.0, 32.0)  # Large sprites have less room, and move at half the speed.
    size = torch.where(chosen("spinning"), torch.full_like(size, 30.0), size)
    size = torch.where(chosen("bouncing"), torch.full_like(size, SMALL), size)
    size = torch.where(chosen("growing"), 16 + 24 * time, size)
    size = torch.where(chosen("shrinking"), 40 - 24 * time, size)

    needs_room = is_large | chosen("spinning") | chosen("growing") | chosen("shrinking")
    needs_room &= ~chosen("bouncing")
    low = torch.where(needs_room, constant(24), constant(16))
    high = SIZE - low
    start = centre(low, high - travel)
    forward, backward = start + travel * time, start + travel * (1 - time)
    x = centre(low, high).expand(-1, FRAMES)
    x = torch.where(chosen("right"), forward, torch.where(chosen("left"), backward, x))
    y = centre(low, high).expand(-1, FRAMES)
    y = torch.where(chosen("down"), forward, torch.where(chosen("up"), backward, y))
    hop = HOP * (2 * math.pi * time).sin().abs()
    y = torch.where(chosen("bouncing"), centre(constant(40), constant(48)) - hop, y)
    turn = math.radians(45) * (FRAMES - 1) * time
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


def compose_clips(
    sprites: Sprites, triples: torch.Tensor, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clips for index triples: video in [-1, 1], (batch, 3, FRAMES, SIZE, SIZE), and the sprite's coverage."""
    batch = len(triples)
    track = sample_tracks(triples[:, 1], generator)
    colours = background_table(triples.device)[triples[:, 2]]
    picture, alpha = draw(
        sprites.images[triples[:, 0]].repeat_interleave(FRAMES, dim=0),
        colours.repeat_interleave(FRAMES, dim=0),
        track.x.flatten(),
        track.y.flatten(),
        track.size.flatten(),
        track.angle.flatten(),
    )
    picture, alpha = (part.unflatten(0, (batch, FRAMES)).transpose(1, 2) for part in (picture, alpha))
    return picture * 2 - 1, alpha


def compose_frames(
    sprites: Sprites, triples: torch.Tensor, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One random frame of each clip, shaped as one-frame videos."""
    batch = len(triples)
    track = sample_tracks(triples[:, 1], generator)
    pick = torch.randint(FRAMES, (batch, 1), device=triples.device, generator=generator)
    colours = background_table(triples.device)[triples[:, 2]]
    at = [part.gather(1, pick).squeeze(1) for part in (track.x, track.y, track.size, track.angle)]
    picture, alpha = draw(sprites.images[triples[:, 0]], colours, *at)
    return (picture * 2 - 1).unsqueeze(2), alpha.unsqueeze(2)
