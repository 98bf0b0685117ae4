"""The replicas of a fleet: started, watched, replaced; what one that ends has left goes on at another.

    members = Members(hire, order, count=4)
    await members.start()
    name = router.choose(await members.offers("/v1/videos", body), "a fox", time.monotonic())
    await members.drain("replica-0")               # replaced by a fresh one, its jobs by then at others
    await members.close()

A replica has a folder of its own inside the fleet's. When its process has ended, asked or not, one of the others
inherits the folder, and a new process takes its place; a replica that is alone goes on with its own.
"""

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from ..order import Order
from .router import Offer

STARTING, READY, DRAINING, ENDED = "starting", "ready", "draining", "ended"
_PATIENCE = 60.0  # seconds that a replica which did not begin is left alone, at most
_SAVING = 10.0  # seconds that saving jobs may take, beside those for draining
_ATTEMPTS = 30
_log = logging.getLogger("loopwright.serving")


class Hired(Protocol):
    """A `Replica` somewhere else, as a coroutine for each of its methods; `kill` ends its process."""

    async def start(self) -> str: ...
    async def run(self) -> None: ...
    async def stop(self) -> None: ...
    async def kill(self) -> None: ...
    async def offer(self, path: str, body: str) -> str: ...
    async def has(self, id: str) -> bool: ...
    async def made(self, owner: str, key: str) -> bool: ...
    async def inherit(self, folders: list[str]) -> int: ...


Hire = Callable[[str, Order], Hired]


@dataclass(eq=False, slots=True)
class Member:
    """A process in a replica's place. Once it has ended, `left` is set when what it had is at `heir`, another or the
    next in its place, and `replaced` when that next one is ready.
    """

    name: str
    order: Order
    state: str = STARTING
    url: str = ""
    hired: Hired | None = None
    heir: "Member | None" = None
    left: asyncio.Event = field(default_factory=asyncio.Event)
    replaced: asyncio.Event = field(default_factory=asyncio.Event)


class Members:
    """On the event loop."""

    def __init__(self, hire: Hire, order: Order, count: int) -> None:
        self._hire, self._order = hire, order
        self.all = {name: self._member(name) for name in (f"replica-{index}" for index in range(count))}
        self._tending: dict[str, asyncio.Task[None]] = {}
        self._inheriting = asyncio.Lock()
        self._closing = False

    @property
    def ready(self) -> list[Member]:
        """Those that take new work."""
        return [member for member in self.all.values() if member.state == READY]

    async def start(self) -> None:
        """Start all at once; one of them inherits what former ones have left. Raises what is in a replica's way."""
        try:
            await asyncio.gather(*(self._begin(member) for member in self.all.values()))
        except BaseException:
            await self.close()
            raise
        for member in list(self.all.values()):
            self._tending[member.name] = asyncio.create_task(self._tend(member.name))
        await self._inherit()

    async def offers(self, path: str, body: str) -> dict[str, Offer]:
        """Of all that are ready; there may be none."""

        async def one(member: Member) -> tuple[str, Offer | None]:
            try:
                assert member.hired is not None
                return member.name, Offer(**json.loads(await member.hired.offer(path, body)))
            except Exception as error:  # it is about to be known as ended
                _log.warning("%s makes no offer: %s", member.name, _last_line(error))
                return member.name, None

        told = await asyncio.gather(*(one(member) for member in self.ready))
        return {name: offer for name, offer in told if offer is not None}

    async def drain(self, name: str) -> None:
        """Take nothing new for a replica, let it finish what is waited for, and replace it; until that is ready."""
        member = self.all[name]
        if member.state == READY and member.hired is not None:
            member.state = DRAINING
            await member.hired.stop()
            await member.replaced.wait()

    async def close(self) -> None:
        """Stop all; what is under way is saved in their folders. Who does not stop in time is ended."""
        self._closing = True
        try:
            async with asyncio.timeout(self._order.settings.drain_seconds + _SAVING):
                await asyncio.gather(*(member.hired.stop() for member in self.all.values() if member.hired))
                await asyncio.gather(*self._tending.values(), return_exceptions=True)
        except Exception as error:
            _log.error("the replicas did not all stop: %s", _last_line(error))
        for member in self.all.values():
            if member.hired is not None:
                await member.hired.kill()

    def _member(self, name: str) -> Member:
        folder = self._order.settings.folder / name
        inner = replace(self._order.settings, folder=folder, tls_cert=None, tls_key=None)
        return Member(name, replace(self._order, settings=inner))

    async def _begin(self, member: Member) -> None:
        member.hired = self._hire(member.name, member.order)
        member.url = await member.hired.start()
        member.state = READY

    async def _tend(self, name: str) -> None:
        """Have a process in this place, until the fleet closes."""
        while not self._closing:
            member = self.all[name]
            assert member.hired is not None
            try:
                await member.hired.run()
            except Exception as error:
                _log.error("%s has ended: %s", name, _last_line(error))
            member.state = ENDED
            if self._closing:
                return
            await member.hired.kill()
            await self._replace(member)

    async def _replace(self, member: Member) -> None:
        """What it has left goes to another now, or else stays in its folder for the next process."""
        await self._inherit()
        fresh = self._member(member.name)
        pause = 1.0
        while not self._closing:
            try:
                await self._begin(fresh)
                break
            except Exception as error:
                _log.error("%s does not start: %s", member.name, _last_line(error))
                await asyncio.sleep(pause)
                pause = min(2 * pause, _PATIENCE)
        self.all[member.name] = fresh
        if member.heir is None:
            member.heir = fresh
        member.left.set()
        member.replaced.set()

    async def _inherit(self) -> None:
        """Give the folders that no process has to one replica: one alone, lest two take up the same job."""
        async with self._inheriting:
            for attempt in range(_ATTEMPTS):
                ready, folders = self.ready, self._ownerless()
                if not ready or not folders:
                    return
                heir = ready[attempt % len(ready)]
                try:
                    assert heir.hired is not None
                    taken = await heir.hired.inherit([str(folder) for folder in folders])
                except Exception as error:  # the heir has ended as well, or the folder's process is ending still
                    _log.warning("%s does not inherit yet: %s", heir.name, _last_line(error))
                    await asyncio.sleep(0.2)
                    continue
                _log.info("%s inherits %d jobs and results", heir.name, taken)
                for member in self.all.values():
                    if member.state == ENDED and member.order.settings.folder in folders:
                        member.heir = heir
                        member.left.set()
                return

    def _ownerless(self) -> list[Path]:
        owned = [member.order.settings.folder for member in self.all.values() if member.state != ENDED]
        return [path for path in sorted(self._order.settings.folder.glob("replica-*")) if path not in owned]


def _last_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[-1] if text else type(error).__name__
