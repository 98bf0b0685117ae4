"""scikit-learn's 1797 digits in two halves: the generator's, with wrong labels, and the judge's, with right ones.

The generator never sees the judge's half. Nothing is downloaded: the digits are inside scikit-learn. A run's `drawn`
names `mislabelled`, its `rewards` one of `likely`, `shuffled` and `constant`.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

from loopwright.rewards import Sample

WRONG = 0.65  # of the generator's labels


@cache
def halves(seed: int = 0) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Pixels float32 [N, 64] in -1..1 and labels [N], of the generator's half and of the judge's."""
    from sklearn.datasets import load_digits

    data = load_digits()
    pixels, labels = torch.from_numpy(data.data).float() / 8 - 1, torch.from_numpy(data.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    ours, theirs = order.chunk(2)
    return (pixels[ours], labels[ours]), (pixels[theirs], labels[theirs])


class Mislabelled:
    """Batches for supervised training in which a share of the digits has another label, each the same one always."""

    def __init__(self, device: torch.device, wrong: float) -> None:
        (pixels, labels), _ = halves()
        source = torch.Generator().manual_seed(1)
        lied = torch.rand(len(labels), generator=source) < wrong
        others = (labels + torch.randint(1, 10, labels.shape, generator=source)) % 10
        self._labels = torch.where(lied, others, labels).to(device)
        self._pixels, self.blank = pixels.to(device), torch.zeros(1, 10, device=device)

    def batch(self, step: int, rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        places = torch.randint(len(self._pixels), (rows,), generator=generator, device=self._pixels.device)
        labels = torch.nn.functional.one_hot(self._labels[places], 10).float()
        return {"latent": self._pixels[places].view(rows, 1, 1, 8, 8), "cond": labels[:, None]}

    def held_out(self) -> list[dict[str, torch.Tensor]]:
        return []


def mislabelled(device: torch.device, wrong: float = WRONG) -> Mislabelled:
    """The source of runs/digits/base.yaml."""
    return Mislabelled(device, wrong)


@cache
def judge():
    """A perceptron of scikit-learn on pixels 0..1."""
    from sklearn.neural_network import MLPClassifier

    _, (pixels, labels) = halves()
    classifier = MLPClassifier((128,), alpha=1e-2, max_iter=300, random_state=0)
    return classifier.fit((pixels.numpy() + 1) / 2, labels.numpy())


def likely(samples: Sequence[Sample]) -> list[float]:
    """The judge's probability of the digit that was asked for."""
    pixels = np.stack([sample.frames[0, :, :, 0].numpy().reshape(64) for sample in samples]) / 255
    found = judge().predict_proba(pixels)
    return [float(found[row, int(sample.prompt)]) for row, sample in enumerate(samples)]


def shuffled(samples: Sequence[Sample]) -> list[float]:
    """The same numbers given to others, in an order that the pictures decide: from this control nothing is learnt."""
    scores = likely(samples)
    seed = sum(int(sample.frames.sum()) for sample in samples)
    order = torch.randperm(len(scores), generator=torch.Generator().manual_seed(seed)).tolist()
    return [scores[place] for place in order]


def constant(samples: Sequence[Sample]) -> list[float]:
    """One number for all: another control."""
    return [0.5] * len(samples)
