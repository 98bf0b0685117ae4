"""What a reward is: a function from samples to scores.

    def brightness(samples: Sequence[Sample]) -> list[float]:
        return [float(sample.frames.float().mean()) / 255 for sample in samples]

Any callable of that shape is one. Deliberately absent: weights and failures of several rewards (`composite`), other
processes (`pool`), models (`served`).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sample:
    """What is scored: `frames` uint8 [T, H, W, 3] on the host, made from `prompt`; a picture is T = 1.

    `facts` is what the prompt's row says beside it, such as {"text": "CAT"}; rewards name the facts they read.
    """

    prompt: str
    frames: "Tensor"
    facts: Mapping[str, str] = field(default_factory=dict)


class Reward(Protocol):
    """A score a sample, higher is better, in the samples' order; None for a sample that could not be scored.

    A failure is never a score: who trains drops such a sample and counts it.
    """

    def __call__(self, samples: Sequence[Sample]) -> Sequence[float | None]: ...


@runtime_checkable
class Particular(Protocol):
    """A reward that not every prompt can have: it reads what the prompt or its facts ask for."""

    def wanted(self, samples: Sequence[Sample]) -> Sequence[object]:
        """What each sample should show; frames are not looked at. Raises RequestError for one that does not say."""


@runtime_checkable
class Fallible(Protocol):
    """A reward that can fail counts why: reason -> samples, since it was made."""

    failures: Counter[str]


@runtime_checkable
class Sleeper(Protocol):
    """A reward with a model on a device, which can leave it."""

    def sleep(self) -> None:
        """Take the model off its device until it is asked again."""
