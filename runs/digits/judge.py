"""The judge of digits: a classifier trained on the half that the generator never sees; rewards by it.

`loopwright train` finds these by "runs/digits/judge.py:likely" in a run's rewards.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

from digits import halves
from loopwright.rewards.reward import Sample


@cache
def judge():
    """A perceptron of scikit-learn on pixels 0..1."""
    from sklearn.neural_network import MLPClassifier

    _, (pixels, labels) = halves()
    classifier = MLPClassifier((128,), alpha=1e-2, max_iter=300, random_state=0)
    return classifier.fit((pixels.numpy() + 1) / 2, labels.numpy())


def probabilities(samples: Sequence[Sample]) -> np.ndarray:
    """What the judge thinks each picture shows, [N, 10]."""
    pixels = np.stack([sample.frames[0, :, :, 0].numpy().reshape(64) for sample in samples]) / 255
    return judge().predict_proba(pixels)


def likely(samples: Sequence[Sample]) -> list[float]:
    """The judge's probability of the digit that was asked for."""
    found = probabilities(samples)
    return [float(found[row, int(sample.prompt)]) for row, sample in enumerate(samples)]


def shuffled(samples: Sequence[Sample]) -> list[float]:
    """The same numbers given to others, in an order that the pictures decide: from this control nothing is learnt."""
    scores = likely(samples)
    seed = int(sum(int(sample.frames.sum()) for sample in samples))
    order = torch.randperm(len(scores), generator=torch.Generator().manual_seed(seed)).tolist()
    return [scores[place] for place in order]


def constant(samples: Sequence[Sample]) -> list[float]:
    """One number for all: another control."""
    return [0.5] * len(samples)
