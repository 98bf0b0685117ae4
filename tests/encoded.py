"""A small data set on disk, and its encodings by a tiny checkpoint."""

import json
from pathlib import Path

import numpy as np

from loopwright import media
from loopwright.data import dataset
from loopwright.data.cache import Cache
from loopwright.data.encodings import Encodings
from loopwright.data.geometry import Geometry

SHAPE = Geometry(32, 32, 5)


def write_rows(folder: Path, count: int = 3) -> Path:
    """A .jsonl of so many clips of noise and a picture. Two clips share their caption, two captions their clip."""
    random = np.random.default_rng(7)
    rows: list[dict[str, str]] = []
    for index in range(count):
        clip = random.integers(0, 256, (6, 40, 32, 3), dtype=np.uint8)
        media.write(folder / f"{index}.mp4", clip, fps=8, metadata={})
        rows.append({"prompt": f"clip {index // 2}", "video": f"{index}.mp4"})
    media.write(folder / "still.png", clip[:1], fps=8, metadata={})
    rows += [{"prompt": "a picture", "image": "still.png"}, {"prompt": "the first again", "video": "0.mp4"}]
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def encodings(cache: Path, checkpoint: Path | str, **options: object) -> Encodings:
    """Encodings on the CPU, at `SHAPE` if nothing else is said."""
    shapes = options.pop("shapes", [SHAPE])
    return Encodings(Cache(cache), checkpoint, shapes, device="cpu", **options)


def main(rows: str, cache: str, checkpoint: str) -> None:
    """What a process of its own does: say that it begins, and fill the cache."""
    print("begun", flush=True)
    encodings(Path(cache), checkpoint).fill(dataset.read(rows))
