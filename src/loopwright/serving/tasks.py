"""Coroutines run together, against each other, and ended for sure.

results = await together([one(), two()])
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def together(work: Sequence[Awaitable[T]]) -> list[T]:
    """The results of all, in order; the first error cancels the others and is raised."""

    async def one(item: Awaitable[T]) -> T:
        return await item

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(item)) for item in work]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def unless(stopping: Coroutine[object, object, object], work: Coroutine[object, object, T]) -> T | None:
    """What `work` gives; None if `stopping` ends first, which cancels `work`. Both have ended afterwards."""
    working, waiting = asyncio.ensure_future(work), asyncio.ensure_future(stopping)
    try:
        await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
    finally:
        await stop(waiting, working)
    return None if working.cancelled() else working.result()


async def until(stopping: asyncio.Event, items: AsyncIterator[T]) -> AsyncIterator[T]:
    """The items, until there are no more or the event is set."""
    while True:
        item = await unless(stopping.wait(), _next(items))
        if item is None:
            return
        yield item


async def beating(items: AsyncIterator[T], seconds: float) -> AsyncGenerator[T | None]:
    """The items, and None whenever none has come for so long."""
    following = asyncio.ensure_future(_next(items))
    try:
        while True:
            await asyncio.wait((following,), timeout=seconds)
            if not following.done():
                yield None
            elif (item := following.result()) is None:
                return
            else:
                yield item
                following = asyncio.ensure_future(_next(items))
    finally:
        await stop(following)


async def _next(items: AsyncIterator[T]) -> T | None:
    return await anext(items, None)


async def stop(*tasks: "asyncio.Future[Any]") -> None:
    """Cancel tasks and wait for their ends."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
