"""A request for images that is sent again under its Idempotency-Key gets the answer it got, or is about to get.

    answer = await repeats.once(Keyed("alice", "key", "hash of the request", "model"), make)

An answer is kept as long as results are, also over a restart. Who asks while it is being made waits for the same one,
which is made as long as anybody waits. What failed may be asked for again.
"""

import asyncio
import sqlite3
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from ..files import replacing
from .records import COMPLETED, Record, Records, new_id
from .refusal import Refusal

_ANSWER = "answer"  # a record's kind, which nobody can ask for but by its key
Make = Callable[[], Coroutine[object, object, bytes]]


@dataclass(frozen=True, slots=True)
class Keyed:
    """Whose request of which model, under which key, and the hash of all that was asked for."""

    owner: str
    key: str
    fingerprint: str
    model: str


@dataclass(slots=True, eq=False)
class _Making:
    """An answer that is being made, and how many wait for it."""

    fingerprint: str
    task: "asyncio.Task[bytes]"
    waiting: int = 0


class Repeats:
    """On the event loop."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._making: dict[tuple[str, str], _Making] = {}

    async def once(self, asked: Keyed, make: Make) -> bytes:
        """The answer; by `make`, unless there is one. Raises Refusal where the key was used for something else."""
        place = (asked.owner, asked.key)
        if place not in self._making:
            known = await self._known(asked)
            if known is not None:
                return known
        if place not in self._making:
            self._making[place] = _Making(asked.fingerprint, asyncio.create_task(self._make(asked, make)))
        making = self._making[place]
        _require_same(making.fingerprint, asked)
        return await self._wait(place, making)

    async def _wait(self, place: tuple[str, str], making: _Making) -> bytes:
        making.waiting += 1
        try:
            return await asyncio.shield(making.task)
        finally:
            making.waiting -= 1
            if not making.waiting:
                making.task.cancel()
                self._making.pop(place, None)

    async def _known(self, asked: Keyed) -> bytes | None:
        record = await asyncio.to_thread(self._records.by_key, asked.owner, asked.key)
        if record is None:
            return None
        _require_same(record.fingerprint, asked)
        return await asyncio.to_thread(self._records.file(record).read_bytes)

    async def _make(self, asked: Keyed, make: Make) -> bytes:
        answer = await make()
        try:
            await asyncio.to_thread(self._keep, asked, answer)
        except sqlite3.IntegrityError:  # another was made and kept while this one looked whether there is one
            return await self._known(asked) or answer
        return answer

    def _keep(self, asked: Keyed, answer: bytes) -> None:
        now = time.time()
        record = Record(
            id=new_id("image"),
            owner=asked.owner,
            model=asked.model,
            status=COMPLETED,
            created=now,
            ended=now,
            echo={},
            suffix=".json",
            kind=_ANSWER,
            key=asked.key,
            fingerprint=asked.fingerprint,
            bytes=len(answer),
        )
        path = self._records.file(record)
        with replacing(path) as temporary:
            temporary.write_bytes(answer)
        try:
            self._records.add(record)
        except BaseException:
            path.unlink()
            raise


def _require_same(fingerprint: str, asked: Keyed) -> None:
    if fingerprint != asked.fingerprint:
        raise Refusal("this Idempotency-Key has made another request", status=409, code="idempotency_conflict")
