"""Engines that sample as actors of Ray: processes of their own on this machine.

    ray = Ray(2, gpus=False)
    engine = ray.hire(order)            # starting
    engine.ready()
    ray.close()

Uses the Ray that this process is connected to, else starts one and stops it in the end. What travels is text, and bytes
of safetensors; what an engine fails at is text, too.
"""

import traceback
from collections.abc import Callable
from typing import Protocol, cast

from ..distributed import local_ray
from ..errors import LoopwrightError
from .engine import Engine

PATIENCE = 300.0  # seconds for a process to start


class EngineError(LoopwrightError):
    """An engine that samples cannot be had, has failed or has ended."""


class Hired(Protocol):
    """An `Engine`, wherever it is. All of it raises EngineError."""

    def ready(self) -> None:
        """Once it has loaded its networks."""

    def take(self, role: str, path: str, version: int) -> None:
        """Send it weights."""

    def run(self, requests: str) -> bytes:
        """Have samples made."""

    def end(self) -> None:
        """At once."""


class Actor:
    """An engine in a process of its own. What it fails at is text, so that no exception has to travel."""

    def __init__(self, order: str) -> None:
        self._order = order

    def begun(self) -> None:
        """Answers once the process has started."""

    def ready(self) -> str:
        """What went wrong, "" if nothing did."""

        def begin() -> None:
            self._engine = Engine(self._order)

        return _problem(begin)

    def take(self, role: str, path: str, version: int) -> str:
        """As `ready`."""
        return _problem(lambda: self._engine.take(role, path, version))

    def run(self, requests: str) -> tuple[str, bytes]:
        """What went wrong, or the samples."""
        made: list[bytes] = []
        return _problem(lambda: made.append(self._engine.run(requests))), b"".join(made)


def _problem(work: Callable[[], None]) -> str:
    try:
        work()
    except LoopwrightError as error:
        return str(error)
    except Exception:
        return traceback.format_exc()
    return ""


class Ray:
    """The Ray that engines are placed by: the one that is there, or one of our own."""

    def __init__(self, count: int, *, gpus: bool) -> None:
        self._count, self._gpus, self._own = count, gpus, False

    def hire(self, order: str) -> "Placed":
        """An engine that is starting."""
        import ray

        self._own |= local_ray.begin(cpus=self._count, gpus=self._count if self._gpus else 0)
        shown = local_ray.all_gpus() if self._gpus else None
        kind = ray.remote(Actor).options(num_cpus=1, num_gpus=int(self._gpus), runtime_env=shown)
        return Placed(kind.remote(order))

    def close(self) -> None:
        """Stop it if it is ours."""
        if self._own:
            import ray

            ray.shutdown()
            self._own = False


class Placed:
    """An engine placed by Ray, as `Hired`."""

    def __init__(self, handle: object) -> None:
        self._handle = handle

    def ready(self) -> None:
        import ray

        begun, _ = ray.wait([getattr(self._handle, "begun").remote()], timeout=PATIENCE)  # noqa: B009
        if not begun:
            raise EngineError("Ray has no room for an engine", remedy="ask for fewer rollout.engines, or make room")
        _require(cast(str, self._asked("ready")))

    def take(self, role: str, path: str, version: int) -> None:
        _require(cast(str, self._asked("take", role, path, version)))

    def run(self, requests: str) -> bytes:
        problem, made = cast(tuple[str, bytes], self._asked("run", requests))
        _require(problem)
        return made

    def end(self) -> None:
        import ray

        ray.kill(self._handle)  # type: ignore[arg-type]

    def _asked(self, method: str, *given: object) -> object:
        import ray

        try:
            return ray.get(getattr(self._handle, method).remote(*given))
        except ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[-1]
            remedy = "the same command continues the run from its last checkpoint"
            raise EngineError(f"an engine that samples has ended ({reason})", remedy=remedy) from error


def _require(problem: str) -> None:
    if problem:
        raise EngineError(f"an engine that samples failed: {problem}")
