"""Interrupts as a question asked between steps, so that a run ends with its checkpoint written.

with asked() as stop:
    while not stop():
        step()
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def asked() -> Iterator[Callable[[], bool]]:
    """A function that tells whether Ctrl-C or SIGTERM has come. Outside the main thread neither can, and it says no."""
    come: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        come.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(come)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
