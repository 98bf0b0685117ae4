"""What a call costs, learnt while running: seconds a row by key and rows, seconds a stage by kind of request.

    prices = Prices(path)
    prices.learn(label(key), rows=4, seconds=0.12)
    prices.rows(label(key), waiting=9, limit=32)      # how many of nine to take into one call

Rows are kept in powers of two. A batch grows by doubling, as long as doubling has made a row cheaper; it stops where
the device is full, because more rows would then only make everybody wait for everybody. Deliberately absent: models of
devices; what was never run has no price.
"""

import json
import threading
import warnings
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path

from ..files import replacing
from ..loop import Key

PAYS = 0.95  # A row must cost less than this share of its price at half as many rows.
SETTLED = 3  # Measurements before a price is believed where it stops a batch from growing.
_MEMORY = 0.2  # What a new measurement weighs at least.


@dataclass(slots=True)
class Price:
    """Seconds, averaged with the recent past weighing more, and how often measured."""

    seconds: float
    count: int

    def learn(self, seconds: float) -> None:
        """Take a measurement. The second replaces the first, which pays for compiling and tuning."""
        self.count += 1
        self.seconds += max(_MEMORY, 1 / max(1, self.count - 1)) * (seconds - self.seconds)


class Prices:
    """Of one device. Kept in `path` if given (`save`); read from it if it exists.

    `learn` is called by the thread that drives a scheduler; everything else from any.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._rows: dict[tuple[str, int], Price] = {}
        self._stages: dict[tuple[str, str], tuple[int, Price]] = {}
        self._chosen: dict[str, int] = {}
        self._lock = threading.Lock()
        if path is not None and path.is_file():
            self._read(path)

    def learn(self, label: str, rows: int, seconds: float) -> None:
        """A call of `rows` rows took `seconds`."""
        name = (label, bucket(rows))
        price = self._rows.get(name)
        if price is None:
            price = self._rows.setdefault(name, Price(seconds / rows, 0))
        price.learn(seconds / rows)

    def seconds(self, label: str, rows: int) -> float | None:
        """What a call of so many rows takes; None if none of that size was measured."""
        price = self._rows.get((label, bucket(rows)))
        return None if price is None else price.seconds * rows

    def rows(self, label: str, waiting: int, limit: int) -> int:
        """How many of `waiting` rows one call should take: fewer than fill the device, or just as many."""
        size = 1
        while size < min(waiting, limit) and self._grows(label, size):
            size *= 2
        return min(size, waiting, limit)

    def _grows(self, label: str, size: int) -> bool:
        """Whether twice as many rows make a row cheaper, or may do so for all that is known."""
        here, there = self._rows.get((label, size)), self._rows.get((label, 2 * size))
        if here is None:
            return there is not None
        return there is None or there.count < SETTLED or there.seconds < PAYS * here.seconds

    def learn_stage(self, kind: str, stage: str, steps: int, seconds: float) -> None:
        """A stage of a request of that kind had so many steps, of so many seconds in all."""
        with self._lock:
            price = self._stages[kind, stage][1] if (kind, stage) in self._stages else None
            if price is None:
                price = Price(seconds / steps, 0)
            price.learn(seconds / steps)
            self._stages[kind, stage] = (steps, price)

    def stage(self, kind: str, stage: str) -> tuple[int, float] | None:
        """The steps of that stage, and the seconds of one; None if no such request has come by."""
        found = self._stages.get((kind, stage))
        return None if found is None else (found[0], found[1].seconds)

    def choose(self, label: str, rows: int) -> None:
        """Keep how many rows the calls of that label shall have in fixed mode."""
        self._chosen[label] = rows

    def chosen(self, label: str) -> int | None:
        """What was chosen for it; None if nothing was."""
        return self._chosen.get(label)

    def save(self) -> None:
        """Write everything to `path`; does nothing without one, and warns where that cannot be written."""
        if self.path is None:
            return
        with self._lock:
            rows = [[label, rows, price.seconds, price.count] for (label, rows), price in list(self._rows.items())]
            stages = [[*name, steps, price.seconds, price.count] for name, (steps, price) in self._stages.items()]
        text = json.dumps({"rows": rows, "stages": stages, "chosen": self._chosen})
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self.path) as temporary:
                temporary.write_text(text, encoding="utf-8")
        except OSError as error:  # no result may be lost for what can be learnt again
            warnings.warn(f"prices are not kept in {self.path}: {error}", RuntimeWarning, stacklevel=2)

    def _read(self, path: Path) -> None:
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            self._rows = {(str(a), int(b)): Price(float(s), int(n)) for a, b, s, n in stored["rows"]}
            self._chosen = {str(name): int(rows) for name, rows in stored["chosen"].items()}
            self._stages = {(str(a), str(b)): (int(c), Price(float(s), int(n))) for a, b, c, s, n in stored["stages"]}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            self._rows, self._chosen, self._stages = {}, {}, {}
            warnings.warn(f"{path} holds no prices ({error}): they are learnt again", RuntimeWarning, stacklevel=2)


def bucket(rows: int) -> int:
    """The power of two that `rows` is filed under: the next above, or itself."""
    return 1 << (rows - 1).bit_length()


def label(key: Key) -> str:
    """A key as text, the same in every process; versions of weights are left out, for they do not change a price."""
    assert isinstance(key, tuple)
    op, uses, binding, tensors, handles, static = key
    names = [name for name, _ in uses]
    return repr((_name(op), names, _plain(binding), _plain(tensors), _plain(handles), _plain(static)))


def _plain(value: Hashable) -> object:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else _name(value)


def _name(value: object) -> str:
    """A function by its name, anything else by its text."""
    return f"{value.__module__}.{value.__qualname__}" if callable(value) else str(value)  # type: ignore[attr-defined]
