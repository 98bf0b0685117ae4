"""A `loopwright serve` of its own process, for benchmarks.

with ServerProcess("loopwright/tiny-wan", folder) as server:
    server.port, server.pid
"""

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType

import loopwright


class ServerProcess:
    """Serves from `folder` on a free port of this machine; its log lies in `folder/server.log`."""

    def __init__(self, model: str, folder: Path, *flags: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as sock:
            self.port: int = sock.getsockname()[1]
        self.log = folder / "server.log"
        command = [sys.executable, "-m", "loopwright", "serve", model, "--port", str(self.port), "--device", "cpu",
                   "--threads", "1", "--folder", str(folder / "served"), *flags]  # fmt: skip
        path = os.pathsep.join([str(Path(loopwright.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        with self.log.open("w") as log:
            self._process = subprocess.Popen(command, stderr=log, env={**os.environ, "PYTHONPATH": path})
        self.pid = self._process.pid

    def __enter__(self) -> "ServerProcess":
        while "serving " not in self.log.read_text():
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended with {self._process.returncode}: {self.log.read_text()}")
            try:
                self._process.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.terminate()
        self._process.wait(60)
