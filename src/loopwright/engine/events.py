"""What happens to a job, live: plain records, handed to its listener in order.

Queued, then Started for each stage, Stepped for each step, Artifact when something can be shown, and at the end one of
Done, Failed or Cancelled.
"""

from dataclasses import dataclass, field

from ..loop import Tensors, Unit


@dataclass(frozen=True, slots=True)
class Queued:
    """The job was accepted."""

    job: str


@dataclass(frozen=True, slots=True)
class Started:
    """A stage begins."""

    job: str
    stage: str


@dataclass(frozen=True, slots=True)
class Stepped:
    """Step `index` of `total` (counted from 1) of a stage is done and took `seconds` of host time.

    `eta` is in how many seconds the job will be done, as far as the scheduler can tell; None without one. Stages that
    no such request has run before count nothing in it.
    """

    job: str
    stage: str
    unit: Unit
    index: int
    total: int
    seconds: float
    eta: float | None = None


@dataclass(frozen=True, slots=True)
class Artifact:
    """Something to show before the job is done, such as the frames decoded so far. Tensors are the listener's."""

    job: str
    stage: str
    tensors: Tensors = field(repr=False)


@dataclass(frozen=True, slots=True)
class Done:
    """The program's outputs as far as the request asked for them, by slot."""

    job: str
    tensors: Tensors = field(repr=False)
    seconds: float


@dataclass(frozen=True, slots=True)
class Failed:
    """The job ended with an error and holds nothing any more."""

    job: str
    error: Exception


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The job was cancelled at a step boundary and holds nothing any more."""

    job: str


Event = Queued | Started | Stepped | Artifact | Done | Failed | Cancelled
