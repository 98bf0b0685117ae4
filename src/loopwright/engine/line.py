"""Those that wait, in the policy's order.

    line.push(entry)        # by its score and order as they are now
    line.first()            # stays in the line
    line.pop()              # and leaves it

Who was pushed again, or whose `ticket` was changed, has left its earlier place: it lies there until its turn comes, or
until there are more such than others. Pushing and popping cost a logarithm of the length.
"""

import heapq

from .entry import Entry


class Line:
    """Entries by score, then by order."""

    def __init__(self) -> None:
        self._places: list[tuple[float, int, int, Entry]] = []

    def __len__(self) -> int:
        """With those that have left and still lie here."""
        return len(self._places)

    def push(self, entry: Entry) -> None:
        """At the place that its score gives it."""
        heapq.heappush(self._places, (entry.score, entry.order, entry.ticket, entry))

    def first(self) -> Entry | None:
        """Who is next."""
        while self._places:
            _, _, ticket, entry = self._places[0]
            if ticket == entry.ticket:
                return entry
            heapq.heappop(self._places)
        return None

    def pop(self) -> Entry | None:
        """Who is next, and is no longer in the line."""
        entry = self.first()
        if entry is not None:
            heapq.heappop(self._places)
        return entry

    def tidy(self, living: int) -> None:
        """Let go of those that have left, where they are more than so many who wait somewhere."""
        if len(self._places) > 2 * living:
            self._places = [place for place in self._places if place[2] == place[3].ticket]
            heapq.heapify(self._places)
