"""Which replica gets a request: the one that has least to do, unless the one that knows its prompt is near that.

    router = Router()
    router.choose({"a": Offer(queued=2.0, own=0.5, weights=1), "b": Offer(1.9, 0.5, 1)}, "a fox", now=time.monotonic())

Replicas whose weights are older than others' get nothing new: no client may see an answer of old weights after one of
new ones. A replica's queue does not show at once what was just sent to it, so that is counted here for a moment.
"""

import hashlib
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass

NEAR = 0.25  # seconds of waiting that embeddings found in a cache are worth
_UNSEEN = 0.5  # seconds until a request that was sent shows in its replica's queue
_GUESS = 1.0  # seconds of a request like none before it


@dataclass(frozen=True, slots=True)
class Offer:
    """What a replica says of itself and a request: seconds of work it has queued, seconds that the request would take
    by the prices it has learnt (None if it has none), and the version of its weights.
    """

    queued: float
    own: float | None
    weights: int


class Router:
    """Remembers what was sent a moment ago. `now` are seconds of any one clock."""

    def __init__(self) -> None:
        self._sent: defaultdict[str, deque[tuple[float, float]]] = defaultdict(deque)

    def choose(self, offers: Mapping[str, Offer], prompt: str | None, now: float) -> str:
        """The name of one of those who offer; there is at least one."""
        newest = max(offer.weights for offer in offers.values())
        loads = {
            name: offer.queued + self._unseen(name, now)
            for name, offer in sorted(offers.items())
            if offer.weights == newest
        }
        least = min(loads, key=loads.__getitem__)
        home = least if prompt is None else max(loads, key=lambda name: _rank(name, prompt))
        chosen = home if loads[home] - loads[least] <= NEAR else least
        own = offers[chosen].own
        self._sent[chosen].append((now, _GUESS if own is None else own))
        return chosen

    def _unseen(self, name: str, now: float) -> float:
        sent = self._sent[name]
        while sent and now - sent[0][0] > _UNSEEN:
            sent.popleft()
        return sum(seconds for _, seconds in sent)


def _rank(name: str, prompt: str) -> bytes:
    """Every prompt has an order of all replicas: one that goes takes only its own prompts along."""
    return hashlib.sha256(f"{name}\0{prompt}".encode()).digest()
