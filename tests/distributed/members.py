"""What the processes of tests do."""

import os
import signal
import sys
import time
from pathlib import Path

import torch

from loopwright.distributed.group import joined, leads, local_size, size
from loopwright.distributed.launch import first_to_say


def report(folder: str) -> int:
    """Each process writes what it knows of the others."""
    with joined("cpu") as group:
        total = float(group.total(torch.tensor([group.rank + 1.0])))
        told, any_ = group.told(41 + group.rank), (group.any(group.rank == 1), group.any(False))
        said = int(group.total(torch.tensor([int(first_to_say("what all find out"))])))
        assert first_to_say(f"what {group.rank} alone finds out")
        line = f"{local_size()} {said} {group.rank} {group.ranks} {size()} {leads()} {total} {told} {any_}"
    Path(folder, str(group.rank)).write_text(line)
    return 0


def fail(how: str) -> int:
    """The second fails at once; the first would wait for long."""
    if os.environ["RANK"] == "0":
        time.sleep(60)
    if how == "raise":
        raise RuntimeError("spoilt")
    if how == "interrupt":
        raise KeyboardInterrupt
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return 2


def wait(folder: str) -> int:
    """Ends well once interrupted."""
    come: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: come.append(number))
    Path(folder, os.environ["RANK"]).write_text("begun")
    while not come:
        time.sleep(0.01)
    return 130


if __name__ == "__main__":
    from loopwright.distributed.launch import launch

    sys.exit(launch(2, wait, (sys.argv[1],)))
