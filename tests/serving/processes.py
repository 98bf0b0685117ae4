"""A server in a process of its own, which writes down every step that a job has taken, as it is taken.

python processes.py STEPS serve MODEL ...      # the command line, with steps counted
"""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from live import free_port

import loopwright
from loopwright.engine.job import Job


class Process:
    """A server on a folder. `steps` are those taken so far: (seed, stage, step), each as often as it was taken."""

    def __init__(self, source: Path, folder: Path, *flags: str) -> None:
        port, self.log = free_port(), folder / "steps.log"
        command = [sys.executable, __file__, str(self.log), "serve", str(source), "--port", str(port)]
        usual = ["--folder", str(folder), "--device", "cpu", "--threads", "1"]
        paths = [Path(loopwright.__file__).parents[1], Path(__file__).parent]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
        self.process = subprocess.Popen([*command, *usual, *flags], env=environment, stderr=subprocess.PIPE, text=True)
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)

    def wait(self) -> None:
        """Until it serves."""
        for line in self.process.stderr:
            if line.startswith("serving "):
                return
        raise AssertionError(f"the server ended with {self.process.wait()}")

    @property
    def steps(self) -> Counter[tuple[int, int, int]]:
        return steps_of(self.log)


def steps_of(log: Path) -> Counter[tuple[int, int, int]]:
    """What `count_steps` has written."""
    lines = log.read_text().splitlines() if log.exists() else []
    return Counter(tuple(map(int, line.split())) for line in lines)


@contextmanager
def serving(source: Path, folder: Path, *flags: str) -> Iterator[Process]:
    started = Process(source, folder, *flags)
    try:
        started.wait()
        yield started
    finally:
        started.process.kill()
        started.process.communicate()
        started.http.close()


def count_steps(log: Path) -> None:
    """From now on, in this process."""
    out, advance = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), Job.advance

    def counted(job: Job, *rest: object) -> None:
        stage = job.stage
        advance(job, *rest)
        os.write(out, f"{job.request.seed} {stage} {job.index}\n".encode())

    Job.advance = counted


if __name__ == "__main__":
    from loopwright.cli import main

    count_steps(Path(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
