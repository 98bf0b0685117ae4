"""How many scores a second rewards give: in this process and from pools of processes, one thread each.

    python benchmarks/rewards.py [--workers 1 2] [--seconds 5] [--output results.json]

Words of three to five letters in a picture of 64x64 are the embedded model's case. On a machine that others use, too,
the time on a core says more than the clock.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib import font_manager
from PIL import Image, ImageDraw, ImageFont

from loopwright.rewards import Sample
from loopwright.rewards.jpeg import JPEG
from loopwright.rewards.ocr import OCR
from loopwright.rewards.pool import Pool
from loopwright.rewards.recogniser import PRECISIONS
from loopwright.rewards.tracking import Colour, Motion

WORDS = ("lamp", "sun", "apple", "zero", "book", "cat", "ocean", "wolf")
Rate = dict[str, float]
BATCH, MOTIONS = 64, ("left", "growing", "spinning", "still")


def processor() -> str:
    """As Linux names it."""
    known = Path("/proc/cpuinfo")
    lines = known.read_text().splitlines() if known.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def word(said: str, width: int, height: int, size: int) -> np.ndarray:
    """White on blue, uint8 [height, width, 3]."""
    image = Image.new("RGB", (width, height), (20, 60, 180))
    font = ImageFont.truetype(font_manager.findfont("DejaVu Sans Mono:bold"), size)
    ImageDraw.Draw(image).text((width / 2, height / 2), said, font=font, fill="white", anchor="mm")
    return np.asarray(image)


def words(width: int, height: int, size: int, length: int = 5) -> list[Sample]:
    """As many pictures as a batch has, of words of so many letters at most."""
    short = [each for each in WORDS if len(each) <= length]
    chosen = [short[place % len(short)] for place in range(BATCH)]
    return [Sample(f'"{w}"', torch.from_numpy(word(w, width, height, size)[None].copy())) for w in chosen]


def whole() -> list[Sample]:
    """Pictures of 48x64 in which everything stands out, so that nothing is cropped or enlarged."""
    pixels = np.random.default_rng(0).integers(0, 256, (BATCH, 1, 48, 64, 3), dtype=np.uint8)
    return [Sample('"sun"', torch.from_numpy(frames)) for frames in pixels]


def clips() -> list[Sample]:
    """Nine frames of a square that moves."""
    samples = []
    for place in range(BATCH // 2):
        frames = np.full((9, 64, 64, 3), 20, np.uint8)
        for time_, frame in enumerate(frames):
            frame[20:44, 30 - 2 * time_ : 54 - 2 * time_] = (200, 120, 40)
        facts = {"motion": MOTIONS[place % len(MOTIONS)], "background": "black"}
        samples.append(Sample("a square", torch.from_numpy(frames), facts))
    return samples


def rate(
    score: Callable[[Sequence[Sample]], Sequence[float | None]], samples: Sequence[Sample], seconds: float
) -> Rate:
    """Scores a second: the median batch by the clock, and the best by this process's time on a core."""
    score(samples)
    clock, core, until = [], [], time.perf_counter() + seconds
    while time.perf_counter() < until or len(clock) < 3:
        begun, worked = time.perf_counter(), time.process_time()
        scores = score(samples)
        clock.append(len(samples) / (time.perf_counter() - begun))
        core.append(len(samples) / max(time.process_time() - worked, 1e-9))
        assert None not in scores
    return {"a second": round(statistics.median(clock), 1), "a second of a core": round(max(core), 1)}


def here(seconds: float, precisions: Sequence[str]) -> dict[str, Rate]:
    """Each reward in this process, on one core."""
    line, short, moving = words(64, 64, 18), words(64, 64, 18, length=3), clips()
    return {
        **{
            f"ocr in {each}, words of 3 to 5 letters in 64x64": rate(OCR(precision=each), line, seconds)
            for each in precisions
        },
        "ocr, words of 3 letters in 64x64": rate(OCR(), short, seconds),
        "ocr, whole pictures of 48x64": rate(OCR(), whole(), seconds),
        "ocr edit, words of 3 to 5 letters in 64x64": rate(OCR("edit"), line, seconds),
        "motion, 9 frames of 64x64": rate(Motion(), moving, seconds),
        "colour, 9 frames of 64x64": rate(Colour(), moving, seconds),
        "jpeg, 64x64": rate(JPEG(), line, seconds),
    }


def pooled(workers: int, seconds: float, precision: str) -> dict[str, float]:
    """OCR in so many processes, of as many pictures as would keep each busy by itself."""
    pool = Pool("ocr", {"precision": precision}, workers=workers)
    try:
        found = rate(pool, workers * words(64, 64, 18), seconds)["a second"]
    finally:
        pool.close()
    return {"a second": found, "a worker": round(found / workers, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="*", default=[1, os.cpu_count() or 1])
    parser.add_argument("--precisions", nargs="*", choices=PRECISIONS, default=PRECISIONS, help="of ocr")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = {
        "cores": os.cpu_count(),
        "machine": processor(),
        "load": round(os.getloadavg()[0], 1),
        "scores in one process": here(args.seconds, args.precisions),
        "ocr in a pool": {
            f"{count}, {precision}": pooled(count, args.seconds, precision)
            for count in args.workers
            for precision in args.precisions
        },
    }
    print(json.dumps(results, indent=2))
    if args.output:
        args.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
