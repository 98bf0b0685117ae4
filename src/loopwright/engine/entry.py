"""A job as the scheduler knows it, those whose next step is like its own, and a call of some of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..loop import Key
from .execute import Call
from .flags import Flags
from .job import Job
from .ledger import Need


@dataclass(slots=True)
class Group:
    """The jobs of one model and mode whose next step has this key: those who wait, how many there are, its label."""

    name: tuple[object, ...]
    key: Key
    label: str
    waiting: dict[int, "Entry"] = field(default_factory=dict)
    members: int = 0


@dataclass(slots=True)
class Entry:
    """What policy, prices and forecasts know of a job.

    Seconds of `work` in all, `worked` so far and `left`; `steps` and `seconds` are of the `stage` it was last in, whose
    first step began at `since`; `later` are those of the stages after that, None if some of them have no price yet.
    `shares` says whether the pending step may be in a call with others'. For that call it has let `yielded` steps of
    others pass, of at most `patience`.
    """

    job: Job
    order: int
    arrived: float
    deadline: float | None
    priority: str
    kind: str
    need: Need | None
    work: float = 0.0
    worked: float = 0.0
    left: float = 0.0
    begun: bool = False
    pending: Call | None = None
    group: Group | None = None
    shares: bool = False
    score: float = 0.0
    ticket: int = 0
    stage: int = 0
    steps: int = 0
    seconds: float = 0.0
    since: float = 0.0
    later: float | None = None
    yielded: int = 0
    patience: int = 0

    @property
    def manner(self) -> tuple[int, str, int]:
        """What must be equal for two jobs ever to share a call."""
        request = self.job.request
        return id(self.job.model), request.mode, request.rows

    @property
    def stale(self) -> bool:
        """Whether weights have changed since the pending step was looked at: its key is of what is gone."""
        assert self.pending is not None and isinstance(self.pending.key, tuple)
        version = self.job.model.version
        return any(version(name) != known for name, known in self.pending.key[1])

    def part(self) -> Group | None:
        """Leave the group; it is returned if nobody is left in it."""
        group, self.group = self.group, None
        if group is None:
            return None
        group.waiting.pop(self.order, None)
        group.members -= 1
        return None if group.members else group


@dataclass(slots=True)
class Flight:
    """A call of so many `rows` that was asked for at `begun` and has not been seen to end; `label` is its key's."""

    entries: Sequence[Entry]
    flags: Flags
    begun: float
    label: str
    rows: int
