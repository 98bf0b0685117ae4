"""Rewards from which nothing about words is to be learnt: what a run must not improve with.

    loopwright train runs/two_steps/words.yaml \
        --set 'rewards={"runs/two_steps/controls.py:shuffled": {"weight": 1.0, "workers": 8}}'
"""

from collections.abc import Sequence
from functools import cache

import torch

from loopwright.rewards import Sample
from loopwright.rewards.ocr import OCR


@cache
def reader() -> OCR:
    """As words.yaml has it."""
    return OCR(frames=1)


def shuffled(samples: Sequence[Sample]) -> list[float]:
    """How well texts can be read, told of other samples, in an order that the pictures decide."""
    scores = reader()(samples)
    seed = sum(int(sample.frames.sum()) for sample in samples)
    order = torch.randperm(len(scores), generator=torch.Generator().manual_seed(seed)).tolist()
    return [scores[place] for place in order]


def constant(samples: Sequence[Sample]) -> list[float]:
    """One number for all."""
    return [0.5] * len(samples)
