"""Measure a tiny-wan folder: generate through diffusers' own pipelines, then judge what came out.

    python evaluate.py generate state/text_to_video/model-ema --sprites sprites.npz --output judged
    python evaluate.py judge judged --sprites sprites.npz --sheet samples.png

Asked for are 500 combinations of object, motion and background that were never trained on, a fifth of them with words
that were never trained on either; the same as single pictures; and as clips from a given first frame. Reported are the
autoencoder's PSNR, and how often what was generated shows what was asked for: words by a reader of text, other objects
by the nearest drawing. The same is done with drawn clips and with their reconstructions, which says how far the judge
can be trusted, and against shuffled prompts, which says what chance would give.

The first command wants a GPU and the second none; between them lie files of less than 16 MB.
"""

import argparse
import json
import math
import random
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import lettering
import numpy as np
import torch
import torch.nn.functional as F
from clips import (
    BACKGROUNDS,
    FRAMES,
    MOTION_PHRASES,
    MOTIONS,
    SIZE,
    Objects,
    background_table,
    caption,
    compose_clips,
    draw,
    ink_table,
    is_held_out,
    quoted,
    scenes,
    split_triples,
)
from diffusers import WanImageToVideoPipeline, WanPipeline
from networks import TEXT_LENGTH
from PIL import Image, ImageDraw

CROP = 24
SEGMENT_THRESHOLD = 0.14
GROWTH = 1.3
MOVE_PIXELS = 8.0
BOUNCE_PIXELS = 9.0
TURN_RATES = tuple(range(25, 51, 5))  # Degrees a frame.

DEMO_PROMPTS: tuple[str, ...] = (
    "a butterfly moving left on a blue background",
    "a rocket moving up on a black background",
    "a red apple growing on a white background",
    "a penguin bouncing on a pink background",
    "a pizza spinning on a green background",
    "a car moving right on a yellow background",
    "an octopus shrinking on a teal background",
    "a robot standing still on an orange background",
    "a crown moving down on a purple background",
    "a guitar spinning on a brown background",
    'the word "lamp" moving left on a red background',
    "the digit 7 bouncing on a green background",
)


PROMPTS, WORD_SHARE, STEPS, GUIDANCE, BATCH, CHUNK = 500, 0.2, 24, 3.0, 125, 125
REBUILT = 4  # one of so many reconstructions is kept to be judged; the PSNR is of all


@dataclass(frozen=True)
class Asked:
    """What one prompt asks for; `index` is the object's, -1 for a word."""

    index: int
    word: str
    motion: int
    background: int

    def prompt(self, names: list[str]) -> str:
        name = quoted(self.word) if self.word else names[self.index]
        return caption(name, MOTIONS[self.motion], list(BACKGROUNDS)[self.background])

    def still(self) -> "Asked":
        """The same of a single picture."""
        return replace(self, motion=MOTIONS.index("still"))

    def picture(self, names: list[str]) -> str:
        """Its prompt, which names no motion."""
        return self.prompt(names).replace(f" {MOTION_PHRASES[MOTIONS[self.motion]][0]} ", " ")


def questions(names: list[str], count: int = PROMPTS) -> list[Asked]:
    """Combinations that were never trained on, ever the same: objects first, then words."""
    rng, (_, unseen) = random.Random(0), lettering.split()
    worded = round(count * WORD_SHARE)
    found = [Asked(i, "", j, k) for i, j, k in rng.sample(split_triples(names)[1].tolist(), count - worded)]
    tones = list(BACKGROUNDS)
    combinations = [(w, j, k) for w in unseen for j in range(len(MOTIONS)) for k in range(len(tones))]
    held = [c for c in combinations if is_held_out(quoted(c[0]), MOTIONS[c[1]], tones[c[2]])]
    return found + [Asked(-1, *each) for each in rng.sample(held, worded)]


def drawn(objects: Objects, asked: list[Asked]) -> tuple[torch.Tensor, torch.Tensor]:
    """Clips as training draws them, and the objects' coverage."""
    device = objects.images.device
    triples = torch.tensor([(a.index, a.motion, a.background) for a in asked], device=device)
    words = lettering.letters([a.word or "aaa" for a in asked]).to(device)
    return compose_clips(scenes(objects, triples, words), torch.Generator(device).manual_seed(0))


@dataclass
class Reading:
    """What the analysis sees in a batch of clips; indices into BACKGROUNDS and the objects."""

    background: torch.Tensor
    motion: list[str]
    sprite: torch.Tensor


def border_colour(video: torch.Tensor) -> torch.Tensor:
    """Median colour of the border over all frames: (batch, 3) for video (batch, frames, 3, H, W) in [0, 1]."""
    ring = torch.zeros(video.shape[-2:], dtype=torch.bool, device=video.device)
    ring[:2], ring[-2:], ring[:, :2], ring[:, -2:] = True, True, True, True
    return video[..., ring].transpose(1, 2).flatten(2).median(dim=2).values


def segment(video: torch.Tensor, colour: torch.Tensor) -> torch.Tensor:
    """Pixels that differ from the background colour, without lone specks: float (batch, frames, H, W)."""
    distance = (video - colour[:, None, :, None, None]).square().sum(dim=2).sqrt()
    mask = (distance > SEGMENT_THRESHOLD).float()
    crowd = F.avg_pool2d(mask, 3, 1, 1)
    return mask * (crowd > 0.4).float()


def track(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Centroid x and y, and area, of every frame's mask."""
    height, width = mask.shape[-2:]
    area = mask.sum(dim=(-1, -2))
    across = torch.arange(width, device=mask.device) + 0.5
    down = torch.arange(height, device=mask.device) + 0.5
    x = (mask.sum(dim=-2) * across).sum(dim=-1) / area.clamp_min(1)
    y = (mask.sum(dim=-1) * down).sum(dim=-1) / area.clamp_min(1)
    return x, y, area


def turned(frame: torch.Tensor, x: torch.Tensor, y: torch.Tensor, degrees: torch.Tensor) -> torch.Tensor:
    """The frame (3, H, W) turned clockwise about a point by each of `degrees`."""
    angle = degrees * math.pi / 180
    cos, sin = angle.cos(), angle.sin()
    centre_x, centre_y = x / SIZE * 2 - 1, y / SIZE * 2 - 1
    theta = torch.stack(
        [
            torch.stack([cos, sin, centre_x - cos * centre_x - sin * centre_y], dim=-1),
            torch.stack([-sin, cos, centre_y + sin * centre_x - cos * centre_y], dim=-1),
        ],
        dim=1,
    )
    grid = F.affine_grid(theta, [len(degrees), 3, SIZE, SIZE], align_corners=False)
    return F.grid_sample(frame.expand(len(degrees), -1, -1, -1), grid, padding_mode="border", align_corners=False)


def is_spinning(video: torch.Tensor, mask: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether turning the first frame at a steady rate explains the later ones better than leaving it alone."""
    where = mask.amax(dim=0)
    weight = where / where.sum().clamp_min(1)
    first, later = video[0], video[1:]
    unchanged = ((later - first).abs().mean(dim=1) * weight).sum(dim=(-1, -2)).mean()
    steps = torch.arange(1, len(video), device=video.device).float()
    changes = [
        ((later - turned(first, x.mean(), y.mean(), rate * steps)).abs().mean(dim=1) * weight).sum(dim=(-1, -2)).mean()
        for rate in TURN_RATES
    ]
    return bool(unchanged > 0.03 and min(changes) < 0.85 * unchanged)


def classify_motion(video: torch.Tensor, mask: torch.Tensor) -> str:
    """The motion of one clip (frames, 3, H, W), or 'nothing' where no sprite is seen."""
    x, y, area = track(mask)
    if area.min() < 12:
        return "nothing"
    if len(video) == 1:
        return "still"
    ends = slice(None, 2), slice(-2, None)
    growth = (area[ends[1]].mean() / area[ends[0]].mean()).sqrt()
    if growth > GROWTH:
        return "growing"
    if growth < 1 / GROWTH:
        return "shrinking"
    move_x, move_y = (x[-1] - x[0]).item(), (y[-1] - y[0]).item()
    if max(abs(move_x), abs(move_y)) > MOVE_PIXELS:
        if abs(move_x) > abs(move_y):
            return "right" if move_x > 0 else "left"
        return "down" if move_y > 0 else "up"
    if (y.max() - y.min()).item() > BOUNCE_PIXELS:
        return "bouncing"
    return "spinning" if is_spinning(video, mask, x, y) else "still"


def crop_box(mask: torch.Tensor) -> tuple[float, float, float]:
    """Centre and side of the square around a mask (H, W), with a pixel to spare."""
    rows, columns = mask.amax(dim=1).nonzero().flatten(), mask.amax(dim=0).nonzero().flatten()
    if len(rows) == 0:
        return SIZE / 2, SIZE / 2, float(SIZE)
    top, bottom, left, right = rows[0].item(), rows[-1].item() + 1, columns[0].item(), columns[-1].item() + 1
    return (left + right) / 2, (top + bottom) / 2, max(bottom - top, right - left) + 2.0


def crop(frame: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The masked object of a frame (3, H, W), scaled to CROP pixels."""
    x, y, side = crop_box(mask)
    theta = torch.tensor(
        [[[side / SIZE, 0, x / SIZE * 2 - 1], [0, side / SIZE, y / SIZE * 2 - 1]]], device=frame.device
    )
    grid = F.affine_grid(theta, [1, 3, 2 * CROP, 2 * CROP], align_corners=False)
    sampled = F.grid_sample(frame[None], grid, padding_mode="border", align_corners=False)
    return F.avg_pool2d(sampled, 2)[0]


class Analyst:
    """Reads clips; the templates it matches objects with are all sprites and digits on all backgrounds."""

    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        self.colours = background_table(objects.images.device)
        self._templates: dict[int, torch.Tensor] = {}

    def templates(self, background: int) -> torch.Tensor:
        """Every object on one background, cropped as a clip's object is: (objects, 3, CROP, CROP)."""
        if background not in self._templates:
            images = self.objects.images
            colour = self.colours[background].expand(len(images), -1)
            ink = ink_table(images.device)[background].view(1, 3, 1, 1) * images[:, 3:]
            painted = torch.where(self.objects.inked.view(-1, 1, 1, 1), ink, images[:, :3])
            middle = torch.full((len(images),), SIZE / 2, device=images.device)
            frames, _ = draw(
                torch.cat([painted, images[:, 3:]], dim=1),
                colour, middle, middle, torch.full_like(middle, 32), torch.zeros_like(middle),
            )  # fmt: skip
            masks = segment(frames[:, None], colour)[:, 0]
            self._templates[background] = torch.stack([crop(f, m) for f, m in zip(frames, masks, strict=True)])
        return self._templates[background]

    def nearest_sprite(self, video: torch.Tensor, mask: torch.Tensor, background: int, motion: str) -> int:
        """Index of the sprite whose template lies nearest; a turning object is compared in its first frame."""
        if motion == "spinning":
            picks = [0]
        elif motion in ("growing", "shrinking"):
            picks = mask.sum(dim=(-1, -2)).topk(3).indices.tolist()
        else:
            picks = [0, len(video) // 2, len(video) - 1]
        templates = self.templates(background)
        total = torch.zeros(len(templates), device=video.device)
        for pick in picks:
            seen = F.pad(crop(video[pick], mask[pick])[None], (1, 1, 1, 1), mode="replicate")[0]
            shifts = [seen[:, dy : dy + CROP, dx : dx + CROP] for dy in range(3) for dx in range(3)]
            distances = [(templates - shifted).square().mean(dim=(1, 2, 3)) for shifted in shifts]
            total += torch.stack(distances).amin(dim=0)
        return int(total.argmin())

    def read(self, video: torch.Tensor, asked: list[Asked]) -> Reading:
        """Background, motion and object of each clip, (batch, frames, 3, H, W) in [0, 1]."""
        colour = border_colour(video)
        background = torch.cdist(colour, self.colours).argmin(dim=1)
        mask = segment(video, colour)
        motion = [classify_motion(clip, clip_mask) for clip, clip_mask in zip(video, mask, strict=True)]
        rows = zip(video, mask, background.tolist(), asked, strict=True)
        sprite = [-1 if a.word else self.nearest_sprite(v, m, b, MOTIONS[a.motion]) for v, m, b, a in rows]
        return Reading(background, motion, torch.tensor(sprite))


def score(video: torch.Tensor, asked: list[Asked], wanted: list[Asked], analyst: Analyst) -> dict[str, object]:
    """Shares of clips, generated for `asked`, that show what `wanted` says, and the motions that were mistaken."""
    from loopwright.rewards.recogniser import Recogniser

    reading = analyst.read(video, asked)
    seen = [MOTIONS[a.motion] for a in wanted]
    right = {
        "motion": [s == w for s, w in zip(reading.motion, seen, strict=True)],
        "background": [int(b) == a.background for b, a in zip(reading.background, wanted, strict=True)],
    }
    if video.shape[1] == 1:
        del right["motion"]
    both = list(zip(asked, wanted, strict=True))
    things = [i for i, (a, w) in enumerate(both) if not (a.word or w.word)]
    worded = [i for i, (a, w) in enumerate(both) if a.word and w.word]
    texts = Recogniser().read([legible(video[i], asked[i]) for i in worded])
    figures: dict[str, object] = {name: share(values) for name, values in right.items()}
    figures["object"] = share([int(reading.sprite[i]) == wanted[i].index for i in things])
    figures["digit"] = share(
        [int(reading.sprite[i]) == wanted[i].index for i in things if analyst.objects.inked[wanted[i].index]]
    )
    figures["word"] = share([text.lower() == wanted[i].word for i, text in zip(worded, texts, strict=True)])
    figures["letters"] = share(
        [a == b for i, t in zip(worded, texts, strict=True) for a, b in paired(t.lower(), wanted[i].word)]
    )
    wrong = Counter(f"{a} seen as {s}" for s, a in zip(reading.motion, seen, strict=True) if s != a)
    return figures | {"mistaken_motions": dict(wrong.most_common(6))}


def share(values: list[bool]) -> float | None:
    """None of nothing."""
    return round(sum(values) / len(values), 4) if values else None


def paired(text: str, word: str) -> list[tuple[str, str]]:
    return list(zip(text.ljust(len(word))[: len(word)], word, strict=True))


def legible(clip: torch.Tensor, asked: Asked) -> np.ndarray:
    """The frame in which a word stands upright and largest, uint8 (H, W, 3)."""
    frame = clip[-1 if MOTIONS[asked.motion] == "growing" else 0]
    return (frame.permute(1, 2, 0).cpu().numpy() * 255).round().astype(np.uint8)


@torch.no_grad()
def reconstruct(pipeline: WanPipeline, video: torch.Tensor, batch: int) -> torch.Tensor:
    """Encode and decode through the pipeline's autoencoder."""
    vae = pipeline.vae
    return torch.cat([vae.decode(vae.encode(part).latent_dist.mode()).sample for part in video.split(batch)])


def psnr(video: torch.Tensor, output: torch.Tensor, alpha: torch.Tensor) -> dict[str, float]:
    """PSNR over all pixels and over those the object covers, videos in [-1, 1]."""
    error = ((output - video) / 2).square()
    inside = error[(alpha > 0.5).expand_as(error)]
    return {
        "all_pixels_db": round(-10 * math.log10(error.mean().item()), 2),
        "object_pixels_db": round(-10 * math.log10(inside.mean().item()), 2),
    }


@torch.no_grad()
def generate(
    pipeline: WanPipeline | WanImageToVideoPipeline, prompts: list[str], frames: int, steps: int, guidance: float,
    images: list[Image.Image] | None = None,
) -> torch.Tensor:  # fmt: skip
    """Clips for prompts: (count, frames, 3, H, W) in [0, 1]. With images, one a call, as that pipeline has it."""
    generator, size = torch.Generator().manual_seed(0), BATCH if images is None else 1
    parts = []
    for start in range(0, len(prompts), size):
        given = {} if images is None else {"image": images[start]}
        made = pipeline(
            prompt=prompts[start : start + size], height=SIZE, width=SIZE, num_frames=frames, num_inference_steps=steps,
            guidance_scale=guidance, max_sequence_length=TEXT_LENGTH, generator=generator, output_type="pt", **given,
        )  # fmt: skip
        parts.append(made.frames)
    return torch.cat(parts).float().clamp(0, 1)


def draw_sheet(videos: torch.Tensor, prompts: list[str], path: Path, scale: int = 2) -> None:
    """One row of frames for each prompt, under its text."""
    videos = (videos.cpu() * 255).round().byte()
    frames, side, line = videos.shape[1], SIZE * scale, 16
    sheet = Image.new("RGB", (frames * side, len(prompts) * (side + line)), "white")
    pen = ImageDraw.Draw(sheet)
    for row, (video, prompt) in enumerate(zip(videos, prompts, strict=True)):
        top = row * (side + line)
        pen.text((3, top + 2), prompt, fill="black")
        for column, frame in enumerate(video):
            picture = Image.fromarray(frame.permute(1, 2, 0).numpy()).resize((side, side), Image.Resampling.NEAREST)
            sheet.paste(picture, (column * side, top + line))
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path, optimize=True)


def run_generate(args: argparse.Namespace) -> None:
    """Write what is to be judged, and the autoencoder's figures."""
    objects, started = Objects.load(args.sprites, args.device), time.monotonic()
    pipeline = WanPipeline.from_pretrained(args.model, torch_dtype=torch.float32).to(args.device)
    parts = {n: getattr(pipeline, n) for n in ("tokenizer", "text_encoder", "transformer", "vae", "scheduler")}
    animator = WanImageToVideoPipeline(**parts, expand_timesteps=True)
    for each in (pipeline, animator):
        each.set_progress_bar_config(disable=True)
    asked = questions(objects.names, args.prompts)
    prompts = [a.prompt(objects.names) for a in asked]
    video, alpha = drawn(objects, asked)
    rebuilt = reconstruct(pipeline, video, BATCH)
    save(args.output, "reconstructions", rebuilt[::REBUILT].transpose(1, 2) / 2 + 0.5)
    made = generate(pipeline, prompts, FRAMES, args.steps, args.guidance)
    save(args.output, "clips", made)
    pictured = [a.picture(objects.names) for a in asked]
    save(args.output, "images", generate(pipeline, pictured, 1, args.steps, args.guidance))
    every = max(len(asked) // args.animated, 1)
    pictures = [
        Image.fromarray(pixels(video[i : i + 1].transpose(1, 2) / 2 + 0.5)[0, 0]) for i in range(0, len(asked), every)
    ]
    save(args.output, "animated", generate(animator, prompts[::every], FRAMES, args.steps, args.guidance, pictures))
    save(args.output, "demo", generate(pipeline, list(DEMO_PROMPTS), FRAMES, args.steps, args.guidance))
    about = {"prompts": len(asked), "every": every, "steps": args.steps, "guidance": args.guidance}
    about |= {"seconds": round(time.monotonic() - started, 1), "autoencoder": psnr(video, rebuilt, alpha)}
    (args.output / "about.json").write_text(json.dumps(about))
    print(json.dumps(about))


def run_judge(args: argparse.Namespace) -> None:
    """Read what was written; print and write the figures."""
    objects, about = Objects.load(args.sprites), json.loads((args.folder / "about.json").read_text())
    analyst, asked = Analyst(objects), questions(objects.names, about["prompts"])
    things, worded = ([a for a in asked if bool(a.word) is said] for said in (False, True))
    shuffled = random.Random(1).sample(things, len(things)) + random.Random(1).sample(worded, len(worded))
    stills, (video, _) = [a.still() for a in asked], drawn(objects, asked)
    made = load(args.folder, "clips")
    judged = {
        "drawn": (video.transpose(1, 2) / 2 + 0.5, asked, asked),
        "reconstructions": (load(args.folder, "reconstructions"), asked[::REBUILT], asked[::REBUILT]),
        "text_to_video": (made, asked, asked),
        "text_to_video, shuffled prompts": (made, asked, shuffled),
        "text_to_image": (load(args.folder, "images"), stills, stills),
        "image_to_video": (load(args.folder, "animated"), asked[:: about["every"]], asked[:: about["every"]]),
    }
    results = about | {name: score(*each, analyst) for name, each in judged.items()}
    (args.folder / "quality.json").write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))
    if args.sheet:
        draw_sheet(load(args.folder, "demo"), list(DEMO_PROMPTS), args.sheet)


def pixels(video: torch.Tensor) -> np.ndarray:
    """(count, frames, 3, H, W) in [0, 1] -> uint8 (count, frames, H, W, 3)."""
    return (video.clamp(0, 1) * 255).round().byte().permute(0, 1, 3, 4, 2).cpu().numpy()


def save(folder: Path, name: str, video: torch.Tensor) -> None:
    """In files of CHUNK clips."""
    folder.mkdir(parents=True, exist_ok=True)
    for index, part in enumerate(video.split(CHUNK)):
        np.savez_compressed(folder / f"{name}-{index}.npz", pixels(part))


def load(folder: Path, name: str) -> torch.Tensor:
    files = [folder / f"{name}-{index}.npz" for index in range(len(list(folder.glob(f"{name}-*.npz"))))]
    stored = np.concatenate([np.load(file)["arr_0"] for file in files])
    return torch.from_numpy(stored).permute(0, 1, 4, 2, 3).float() / 255


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    make = commands.add_parser("generate")
    make.add_argument("model", type=Path)
    make.add_argument("--output", type=Path, required=True)
    make.add_argument("--prompts", type=int, default=PROMPTS)
    make.add_argument("--animated", type=int, default=50, help="clips from a first frame")
    make.add_argument("--steps", type=int, default=STEPS)
    make.add_argument("--guidance", type=float, default=GUIDANCE)
    make.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    make.set_defaults(run=run_generate)
    judge = commands.add_parser("judge")
    judge.add_argument("folder", type=Path)
    judge.add_argument("--sheet", type=Path, help="PNG of a few generated clips")
    judge.set_defaults(run=run_judge)
    for command in (make, judge):
        command.add_argument("--sprites", type=Path, default=Path("sprites.npz"))
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
