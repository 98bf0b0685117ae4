"""Measure a tiny-wan folder through diffusers' own WanPipeline.

Reported are the autoencoder's PSNR on held-out clips, and for prompts whose combination was never trained on, how
often the generated clip shows the background, the motion and the object that was asked for. The same analysis is
run on drawn clips and on their reconstructions first, which says how far it can be trusted.

    python evaluate.py tiny-wan --sprites sprites.npz --output quality.json --sheet samples.png
"""

import argparse
import json
import math
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from clips import BACKGROUNDS, MOTIONS, SIZE, Sprites, background_table, caption, compose_clips, draw, split_triples
from diffusers import UniPCMultistepScheduler, WanPipeline
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
)


@dataclass
class Reading:
    """What the analysis sees in a batch of clips; indices into BACKGROUNDS, MOTIONS and the sprites."""

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
    """Reads clips; the templates it matches objects with are all sprites on all backgrounds."""

    def __init__(self, sprites: Sprites) -> None:
        self.sprites = sprites
        self.colours = background_table(sprites.images.device)
        self._templates: dict[int, torch.Tensor] = {}

    def templates(self, background: int) -> torch.Tensor:
        """Every sprite on one background, cropped as a clip's object is: (sprites, 3, CROP, CROP)."""
        if background not in self._templates:
            count = len(self.sprites.images)
            colour = self.colours[background].expand(count, -1)
            middle = torch.full((count,), SIZE / 2, device=colour.device)
            frames, _ = draw(
                self.sprites.images, colour, middle, middle, torch.full_like(middle, 32), torch.zeros_like(middle)
            )
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

    def read(self, video: torch.Tensor, asked_motion: list[str]) -> Reading:
        """Background, motion and object of each clip, (batch, frames, 3, H, W) in [0, 1]."""
        colour = border_colour(video)
        background = torch.cdist(colour, self.colours).argmin(dim=1)
        mask = segment(video, colour)
        motion = [classify_motion(clip, clip_mask) for clip, clip_mask in zip(video, mask, strict=True)]
        sprite = [
            self.nearest_sprite(*item) for item in zip(video, mask, background.tolist(), asked_motion, strict=True)
        ]
        return Reading(background, motion, torch.tensor(sprite))


def score(reading: Reading, triples: torch.Tensor) -> dict[str, object]:
    """Shares of clips that show what their triple says, and the motions that were mistaken."""
    asked = [MOTIONS[index] for index in triples[:, 1].tolist()]
    right_motion = [seen == wanted for seen, wanted in zip(reading.motion, asked, strict=True)]
    right_background = (reading.background.cpu() == triples[:, 2]).tolist()
    right_sprite = (reading.sprite == triples[:, 0]).tolist()
    together = [all(row) for row in zip(right_motion, right_background, right_sprite, strict=True)]
    wrong = Counter(f"{a} seen as {s}" for s, a in zip(reading.motion, asked, strict=True) if s != a)
    share = {
        name: round(sum(values) / len(values), 4)
        for name, values in (
            ("motion", right_motion),
            ("background", right_background),
            ("object", right_sprite),
            ("all_three", together),
        )
    }
    return share | {"mistaken_motions": dict(wrong.most_common(6))}


@torch.no_grad()
def reconstruct(pipeline: WanPipeline, video: torch.Tensor, batch: int) -> torch.Tensor:
    """Encode and decode through the pipeline's autoencoder."""
    vae = pipeline.vae
    return torch.cat([vae.decode(vae.encode(part).latent_dist.mode()).sample for part in video.split(batch)])


def psnr(video: torch.Tensor, output: torch.Tensor, alpha: torch.Tensor) -> dict[str, float]:
    """PSNR over all pixels and over those the sprite covers, videos in [-1, 1]."""
    error = ((output - video) / 2).square()
    inside = error[(alpha > 0.5).expand_as(error)]
    return {
        "all_pixels_db": round(-10 * math.log10(error.mean().item()), 2),
        "sprite_pixels_db": round(-10 * math.log10(inside.mean().item()), 2),
    }


def with_shift(pipeline: WanPipeline, shift: float | None) -> float:
    """Set the sampler's flow shift, or keep the shipped one; returns the shift in force."""
    if shift is not None:
        pipeline.scheduler = UniPCMultistepScheduler.from_config(pipeline.scheduler.config, flow_shift=shift)
    return pipeline.scheduler.config.flow_shift


@torch.no_grad()
def generate(pipeline: WanPipeline, prompts: list[str], guidance: float, steps: int, batch: int) -> torch.Tensor:
    """Clips for prompts: (count, frames, 3, H, W) in [0, 1], on the pipeline's device."""
    generator = torch.Generator().manual_seed(0)
    parts = [
        pipeline(
            prompt=prompts[start : start + batch],
            height=SIZE,
            width=SIZE,
            num_frames=9,
            num_inference_steps=steps,
            guidance_scale=guidance,
            max_sequence_length=TEXT_LENGTH,
            generator=generator,
            output_type="pt",
        ).frames
        for start in range(0, len(prompts), batch)
    ]
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


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--sprites", type=Path, default=Path("sprites.npz"))
    parser.add_argument("--output", type=Path, default=None, help="JSON with all figures")
    parser.add_argument("--sheet", type=Path, default=None, help="PNG of a few generated clips")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--guidance", type=float, nargs="*", default=[4.0])
    parser.add_argument("--shift", type=float, nargs="*", default=[None], help="flow shifts to try")
    parser.add_argument("--steps", type=int, nargs="*", default=[20])
    parser.add_argument("--batch", type=int, default=200)
    parser.add_argument("--sheet-rows", type=int, default=len(DEMO_PROMPTS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    sprites = Sprites.load(args.sprites, args.device)
    pipeline = WanPipeline.from_pretrained(args.model, torch_dtype=torch.float32).to(args.device)
    pipeline.set_progress_bar_config(disable=True)
    results: dict[str, object] = {"sprites": len(sprites.names), "prompts": args.prompts, "samples": []}
    if args.prompts:
        analyst = Analyst(sprites)
        _, held_out = split_triples(sprites.names)
        order = torch.randperm(len(held_out), generator=torch.Generator().manual_seed(0))
        triples = held_out[order[: args.prompts]]
        motions = [MOTIONS[index] for index in triples[:, 1].tolist()]
        backgrounds = list(BACKGROUNDS)
        prompts = [caption(sprites.names[i], MOTIONS[j], backgrounds[k]) for i, j, k in triples.tolist()]

        drawn, alpha = compose_clips(sprites, triples.to(args.device), torch.Generator(args.device).manual_seed(0))
        rebuilt = reconstruct(pipeline, drawn, args.batch)
        results["autoencoder"] = psnr(drawn, rebuilt, alpha)
        for name, video in (("drawn_clips", drawn), ("reconstructions", rebuilt)):
            results[name] = score(analyst.read(video.transpose(1, 2) / 2 + 0.5, motions), triples)
        print(json.dumps(results), flush=True)
        for shift in args.shift:
            for guidance in args.guidance:
                for steps in args.steps:
                    used_shift = with_shift(pipeline, shift)
                    started = time.monotonic()
                    videos = generate(pipeline, prompts, guidance, steps, args.batch)
                    seconds = time.monotonic() - started
                    figures = {"shift": used_shift, "guidance": guidance, "steps": steps, "seconds": round(seconds, 1)}
                    figures |= score(analyst.read(videos, motions), triples)
                    results["samples"].append(figures)
                    print(json.dumps(figures), flush=True)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(results, indent=2) + "\n")
    if args.sheet:
        with_shift(pipeline, args.shift[0])
        shown = list(DEMO_PROMPTS[: args.sheet_rows])
        draw_sheet(generate(pipeline, shown, args.guidance[0], args.steps[0], args.batch), shown, args.sheet)


if __name__ == "__main__":
    main()
