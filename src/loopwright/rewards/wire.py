"""Asks a service, over HTTP, for many things at once: bounded in time, in number and in size; failures are counted.

    calls = Calls(timeout=30, retries=3, concurrency=8)
    answers = calls.each(bodies, ask)       # ask(body) -> Question; None where nothing came of it

What may pass (no connection, no answer in time, a busy server, an answer that cannot be read) is tried again after
twice the pause of the time before, or after what the server asks for; what will not (a request that is refused) is not.
Requests run in an event loop of their own, for only there a time can be that of all of a try: who sends a header a
minute would else never be too late. Deliberately absent: compressed answers, which have no bound.
"""

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import httpx

from ..errors import RequestError

T = TypeVar("T")
R = TypeVar("R")
LARGEST = 2**20  # bytes of an answer
PAUSE, LONGEST = 0.5, 30.0  # seconds between tries: the first, and at most
_AGAIN = (408, 425, 429, *range(500, 600))  # statuses


class Unreadable(ValueError):
    """An answer does not say what it should."""


def parsed(answer: bytes) -> object:
    """What JSON says. Raises Unreadable, as for what is nested deeper than anyone means."""
    try:
        said: object = json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise Unreadable("not json") from error
    return said


@dataclass(frozen=True, slots=True)
class Question(Generic[R]):
    """A request's body, what it is, and how its answer is read; `read` raises Unreadable."""

    body: bytes
    kind: str
    read: Callable[[bytes], R]


class _Failed(Exception):
    """What went wrong with a try, whether another may help, and after how many seconds at the least."""

    def __init__(self, reason: str, *, again: bool, pause: float = 0.0) -> None:
        super().__init__(reason)
        self.again, self.pause = again, pause


class Calls:
    """POSTs to one address. `timeout` is the seconds of one try from its first to its last byte.

    `failures` counts, by reason, what was given up. Safe from several threads.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 30.0,
        retries: int = 3,
        concurrency: int = 8,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if not _is_address(url):
            raise RequestError("a scorer's address is no address", value=url, remedy="as in http://host:8000/score")
        bounds = (("timeout", timeout, 1e-3), ("retries", retries, 0), ("concurrency", concurrency, 1))
        for what, value, least in bounds:
            if value < least:
                raise RequestError(f"a scorer's {what} is too small", value=value, remedy=f"give {least:g} or more")
        self.failures: Counter[str] = Counter()
        self._url, self._timeout, self._retries = url, timeout, retries
        limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        headers = {**(headers or {}), "accept-encoding": "identity"}
        self._client = httpx.AsyncClient(timeout=None, limits=limits, headers=headers)
        self._open = asyncio.Semaphore(concurrency)
        self._counting = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="scorer", daemon=True)
        self._thread.start()

    def each(self, items: Sequence[T], ask: Callable[[T], Question[R]], size: Callable[[T], int]) -> list[R | None]:
        """The answer for each item, None where it was given up; `size` says how many samples that costs."""
        asked = asyncio.run_coroutine_threadsafe(self._answers(items, ask, size), self._loop)
        try:
            return asked.result()
        finally:
            asked.cancel()  # who interrupts waits for no answer

    def count(self, reason: str, samples: int) -> None:
        """So many samples have no score for that reason."""
        with self._counting:
            self.failures[reason] += samples

    def close(self) -> None:
        """Drop the connections."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._client.aclose(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _answers(
        self, items: Sequence[T], ask: Callable[[T], Question[R]], size: Callable[[T], int]
    ) -> list[R | None]:
        async def one(item: T) -> R | None:
            return await self._patiently(item, ask, size(item))

        return await asyncio.gather(*map(one, items))

    async def _patiently(self, item: T, ask: Callable[[T], Question[R]], samples: int) -> R | None:
        async with self._open:
            question = await asyncio.to_thread(ask, item)  # pictures take time to be packed
            for tried in range(self._retries + 1):
                try:
                    return await self._once(question)
                except _Failed as failed:
                    if not failed.again or tried == self._retries:
                        self.count(str(failed), samples)
                        return None
                    pause = min(max(PAUSE * 2**tried, failed.pause), LONGEST)
                await asyncio.sleep(pause)
        raise AssertionError("unreachable")

    async def _once(self, question: Question[R]) -> R:
        try:
            async with asyncio.timeout(self._timeout):
                answer = await self._answer(question)
            return question.read(answer)
        except TimeoutError as error:
            raise _Failed("no answer in time", again=True) from error
        except httpx.TransportError as error:
            raise _Failed(f"no connection ({type(error).__name__})", again=True) from error
        except Unreadable as error:
            raise _Failed(f"unreadable answer: {error}", again=True) from error

    async def _answer(self, question: Question[R]) -> bytes:
        answer = bytearray()
        async with self._client.stream(
            "POST", self._url, content=question.body, headers={"content-type": question.kind}
        ) as response:
            if response.status_code != httpx.codes.OK:
                status = response.status_code
                raise _Failed(f"status {status}", again=status in _AGAIN, pause=_asked_pause(response))
            if response.headers.get("content-encoding", "identity") != "identity":
                raise Unreadable("it is compressed")
            async for part in response.aiter_raw():
                answer += part
                if len(answer) > LARGEST:
                    raise Unreadable(f"more than {LARGEST} bytes")
        return bytes(answer)


def _is_address(url: str) -> bool:
    try:
        found = httpx.URL(url)
    except httpx.InvalidURL:
        return False
    return found.scheme in ("http", "https") and bool(found.host)


def _asked_pause(response: httpx.Response) -> float:
    """Seconds that a busy server asks to wait, 0 if it does not say so in seconds."""
    asked = response.headers.get("retry-after", "")
    return float(asked) if asked.isdecimal() else 0.0
