"""In which order requests run: a policy gives each a score in seconds, and the lowest goes first.

    scheduler = Scheduler(policy=POLICIES["shortest"])

A score never depends on the present, only on when a request came: so all requests age alike, and a request can be
overtaken only by those that come within a bounded time after it. Nobody starves. A priority class is a head start of so
many seconds, for the same reason.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

AGEING = 0.1  # Under `shortest`, a second of waiting makes up for so many seconds of work.
SLACK = 10.0  # A request without a deadline is due after so many times the work it brings.
HEAD_START: Mapping[str, float] = {"high": 60.0, "normal": 0.0, "low": -60.0}


class Candidate(Protocol):
    """What a policy may look at. Times in seconds of the scheduler's clock; `work` and `left` as priced now."""

    arrived: float
    work: float
    left: float
    deadline: float | None
    priority: str


Policy = Callable[[Candidate], float]


def first_come(candidate: Candidate) -> float:
    """In order of arrival."""
    return candidate.arrived - HEAD_START[candidate.priority]


def shortest(candidate: Candidate) -> float:
    """The least work left first. A request with W seconds left is overtaken during W / AGEING seconds at most."""
    return candidate.left + AGEING * (candidate.arrived - HEAD_START[candidate.priority])


def earliest_deadline(candidate: Candidate) -> float:
    """The earliest deadline first; without one, a request is due SLACK times its own work after its arrival."""
    own = candidate.arrived + SLACK * candidate.work
    return (own if candidate.deadline is None else candidate.deadline) - HEAD_START[candidate.priority]


POLICIES: Mapping[str, Policy] = {"fifo": first_come, "shortest": shortest, "deadline": earliest_deadline}
