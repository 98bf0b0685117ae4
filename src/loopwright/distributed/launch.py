"""Starts the processes of a run on this machine, and ends them together.

    status = launch(2, work, ("run.yaml",))     # work("run.yaml") in two processes; the status of the first to fail

`work` is an importable function that returns an exit status. For several machines use torchrun. An interrupt is passed
on, and the processes are waited for: it is theirs to end well. Deliberately absent: restarting.
"""

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from torch._C._distributed_c10d import TCPStore
from torch.multiprocessing.spawn import ProcessExitedException, start_processes

Work = Callable[..., int]
INTERRUPTED = 130  # the exit status of who is ended by Ctrl-C


def launch(processes: int, work: Work, arguments: tuple[object, ...]) -> int:
    """Run `work(*arguments)` in so many processes. Their exit status; if one fails, the others are ended.

    An exception in one of them is raised here, with its traceback.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = start_processes(  # type: ignore[no-untyped-call]
        _begin, (processes, store.port, work, arguments), nprocs=processes, join=False, start_method="spawn"
    )
    assert context is not None

    def pass_on(number: int, frame: FrameType | None) -> None:
        for process in context.processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGINT)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        while not context.join():
            pass
        return 0
    except ProcessExitedException as error:
        return int(error.exit_code)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def first_to_say(text: str) -> bool:
    """In a process that `launch` started: whether no other has said this, so that what all find out is told once."""
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    return int(store.add(f"said/{text}", 1)) == 1


def _begin(index: int, processes: int, port: int, work: Work, arguments: tuple[object, ...]) -> None:
    """In the process itself: the environment that torchrun would give, then the work."""
    os.environ |= {
        "RANK": str(index),
        "LOCAL_RANK": str(index),
        "WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is the parent's, so no port is taken twice
    }
    try:
        status = work(*arguments)
    except KeyboardInterrupt:  # torch would take this for a good end
        status = INTERRUPTED
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # done is done: threads that torch leaves now and then abort an interpreter that tears itself down
