"""What makes samples, wherever it is: a `Model` of this process, or engines in others (`engines`)."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from ..api import Result
from ..request import Request


class Sampler(Protocol):
    """Takes complete requests, all at once."""

    def run_all(self, requests: Sequence[Request], *, recorded: bool = False) -> Iterator[Result]:
        """Results in any order, with their trajectories if `recorded`. Raises what ended a request."""
