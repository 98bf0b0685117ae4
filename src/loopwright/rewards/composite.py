"""Several rewards as one: their weighted sum, each also by its name.

    score = Composite({"ocr": (OCR(), 1.0), "jpeg": (JPEG(), -0.1)})
    parts = score.parts(samples)        # {"ocr": [0.9, None], "jpeg": [1.2, 1.4]}
    score.total(parts)                  # [0.78, None]

A sample that one part could not score has no total: a failure is never a zero. A score that is no finite number is a
failure as well, and so is what a reward raises: its samples are tried one by one, and the one it raises for has no
score. Prompts that a reward cannot have are told beforehand, by `require`. Deliberately absent: normalising parts by
their spread, which belongs to who knows the groups.
"""

import math
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from threading import Lock
from typing import SupportsFloat

from ..errors import RequestError
from .reward import Fallible, Particular, Reward, Sample, Sleeper

Parts = Mapping[str, Sequence[float | None]]


class Composite:
    """A reward made of named ones with their weights. Raises RequestError where there are none.

    Asked by several threads it answers one after the other, for not every reward is safe from that.
    """

    def __init__(self, rewards: Mapping[str, tuple[Reward, float]]) -> None:
        if not rewards:
            raise RequestError("no rewards are named", remedy='give some, such as {"ocr": 1.0}')
        for name, (_, weight) in rewards.items():
            if not math.isfinite(weight) or weight == 0:
                raise RequestError(f"reward {name} needs a weight", value=weight, remedy="leave it out, or give one")
        self._rewards = dict(rewards)
        self._failures: Counter[str] = Counter()
        self._asked = Lock()

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        """The total of each sample."""
        return self.total(self.parts(samples))

    def parts(self, samples: Sequence[Sample]) -> dict[str, list[float | None]]:
        """What each reward says of each sample, unweighted; None where it raises or says too little or much."""
        with self._asked:
            return {name: self._scores(name, reward, samples) for name, (reward, _) in self._rewards.items()}

    def total(self, parts: Parts) -> list[float | None]:
        """The weighted sum of a sample's parts, None where one of them is."""
        weights = [weight for _, weight in self._rewards.values()]
        rows = zip(*(parts[name] for name in self._rewards), strict=True)
        return [_sum(row, weights) for row in rows]

    def require(self, samples: Sequence[Sample]) -> None:
        """Raise RequestError if a prompt lacks what a reward reads of it. Frames are not looked at."""
        for reward, _ in self._rewards.values():
            if isinstance(reward, Particular):
                reward.wanted(samples)

    @property
    def failures(self) -> Counter[str]:
        """Samples that were not scored, by part and reason, since the beginning."""
        found = Counter(self._failures)
        for name, (reward, _) in self._rewards.items():
            if isinstance(reward, Fallible):
                found.update({f"{name}: {reason}": count for reason, count in reward.failures.items()})
        return found

    def sleep(self) -> None:
        """Have scorers that are models leave their devices until they are asked again."""
        for reward, _ in self._rewards.values():
            if isinstance(reward, Sleeper):
                reward.sleep()

    def close(self) -> None:
        """End what rewards have started: processes and connections."""
        with ExitStack() as closing:
            for reward, _ in self._rewards.values():
                if hasattr(reward, "close"):
                    closing.callback(reward.close)

    def _scores(self, name: str, reward: Reward, samples: Sequence[Sample]) -> list[float | None]:
        """Together, else each by itself."""
        scores = _said(reward, samples)
        if isinstance(scores, Exception):
            if len(samples) == 1:
                self._failed(name, scores)
                return [None]
            return [self._scores(name, reward, [sample])[0] for sample in samples]
        strange = [place for place, score in enumerate(scores) if score is not None and not math.isfinite(score)]
        for place in strange:
            scores[place] = None
        if strange:
            self._failures[f"{name}: not a finite number"] += len(strange)
        return scores

    def _failed(self, name: str, error: Exception) -> None:
        """Count it, and the first time show where in the reward it comes from."""
        reason = f"{name}: {type(error).__name__}: {error}"
        if reason not in self._failures:
            traceback.print_exception(error)
        self._failures[reason] += 1


def _said(reward: Reward, samples: Sequence[Sample]) -> list[float | None] | Exception:
    """The scores, or what is raised on the way to them, which is the samples' failure whatever it is."""
    try:
        return _checked(reward(samples), len(samples))
    except Exception as error:
        return error


def _checked(said: Sequence[float | None], count: int) -> list[float | None]:
    scores = list(said)
    if len(scores) != count:
        raise ValueError(f"{len(scores)} scores for {count} samples")
    for score in scores:
        if score is not None and not isinstance(score, SupportsFloat):
            raise TypeError(f"a score is no number: {score!r}")
    return [None if score is None else float(score) for score in scores]


def _sum(scores: Sequence[float | None], weights: Sequence[float]) -> float | None:
    total = 0.0
    for score, weight in zip(scores, weights, strict=True):
        if score is None:
            return None
        total += weight * score
    return total
