"""An untrained label-conditional model of digits, as a folder that every command takes.

python runs/digits/start.py out/digits/start
"""

import argparse
from pathlib import Path

import torch

from loopwright.card import dumps
from loopwright.models.labels import describe
from loopwright.models.labels.network import LabelFlow


def write(folder: Path, *, width: int = 256, depth: int = 4, seed: int = 0) -> Path:
    """Random weights by the seed; the folder."""
    torch.manual_seed(seed)
    network = LabelFlow([str(digit) for digit in range(10)], size=8, channels=1, width=width, depth=depth)
    network.save_pretrained(folder / "transformer")
    (folder / "card.json").write_text(dumps(describe(folder)), encoding="utf-8")
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    print(write(parser.parse_args().folder))
