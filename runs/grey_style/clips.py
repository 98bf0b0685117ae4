"""Clips for a style: what the shipped model makes of some prompts, without its colours.

    python clips.py --output clips --count 48

The captions still name the colours, so an adapter trained on these learns a look and not a word.
"""

import argparse
import itertools
import json
from pathlib import Path

import numpy as np

import loopwright
from loopwright import media

OBJECTS = ("a fox", "a red apple", "a butterfly", "a tiger", "a rocket", "a tulip", "a whale", "a strawberry")
MOTIONS = ("moving left", "moving right", "growing", "spinning", "still", "bouncing")
GROUNDS = ("blue", "green", "yellow", "purple")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("clips"))
    parser.add_argument("--count", type=int, default=48)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    model = loopwright.load("loopwright/tiny-wan")
    prompts = [f"{o} {m} on a {g} background" for o, m, g in itertools.product(OBJECTS, MOTIONS, GROUNDS)]
    chosen = np.random.default_rng(0).permutation(len(prompts))[: arguments.count]
    requests = [model.request(prompts[i], seed=int(i), mode="throughput") for i in chosen]
    rows = []
    for result in model.run_all(requests):
        grey = result.video.mean(axis=-1, keepdims=True).round().astype(np.uint8).repeat(3, axis=-1)
        name = f"{result.request.seed:03}.mp4"
        media.write(arguments.output / name, grey, fps=result.request.fps, metadata={})
        rows.append({"prompt": result.request.prompt, "video": name})
    (arguments.output / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
