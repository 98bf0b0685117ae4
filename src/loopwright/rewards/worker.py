"""A process that scores: its end here, and what runs there.

    worker = Worker("ocr", {"frames": 1})
    worker.ready()
    worker.score(samples, timeout=30)

The two talk over a `pipe`. A worker that does not take its samples or does not answer in time is killed, for nobody
knows what it does.
Workers are forked from a process of Python's `multiprocessing` that has imported torch and done nothing else, so that
replacing one takes no seconds. As that module asks, a script that starts some guards its main part.
"""

import contextlib
import json
import math
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from ..errors import LoopwrightError, RequestError
from .choose import Value, build
from .pipe import receive, send
from .reward import Reward, Sample

START = 300.0  # seconds
_FORKED = multiprocessing.get_context("forkserver")


class Lost(Exception):
    """The samples have no scores, for this reason; `ended` says whether the worker is gone as well."""

    def __init__(self, reason: str, *, ended: bool) -> None:
        super().__init__(reason)
        self.ended = ended


class Worker:
    """A process that runs one reward. Not to be used by two threads at once. Raises RequestError where none begins."""

    def __init__(self, name: str, parameters: Mapping[str, Value]) -> None:
        _FORKED.set_forkserver_preload([__name__])
        order = json.dumps({"folder": os.getcwd(), "name": name, "parameters": dict(parameters)})
        with contextlib.ExitStack() as failing:
            try:
                self._talk, theirs = map(failing.enter_context, socket.socketpair())
                self._process = _FORKED.Process(target=main, args=(theirs, order), daemon=True)
                self._process.start()
            except (OSError, EOFError) as error:
                raise RequestError(f"a scorer's process cannot begin: {error}") from error
            failing.pop_all()
        theirs.close()

    def ready(self) -> None:
        """Wait until it has begun. Raises RequestError with what keeps it from that."""
        try:
            if problem := self._answer(time.monotonic() + START).get("problem"):
                raise RequestError(str(problem))
        except Lost as lost:
            raise RequestError(f"a scorer's process cannot begin: {lost}") from lost

    def score(self, samples: Sequence[Sample], timeout: float) -> list[float | None]:
        """A score or None for each sample, `timeout` seconds from now at the latest. Raises Lost."""
        until = time.monotonic() + timeout
        with self._alive():
            send(self._talk, [_packed(sample) for sample in samples], until)
        answer = self._answer(until)
        if "problem" in answer:
            raise Lost(str(answer["problem"]), ended=False)
        scores = answer["scores"]
        assert isinstance(scores, list)
        return scores

    def end(self) -> None:
        """Kill the process, whatever it does."""
        self._talk.close()
        self._process.kill()
        self._process.join()

    def _answer(self, until: float) -> dict[str, object]:
        with self._alive():
            answer = receive(self._talk, until)
        assert isinstance(answer, dict)
        return answer

    @contextlib.contextmanager
    def _alive(self) -> Iterator[None]:
        """Raises Lost where it is not, or stops to be in time."""
        try:
            yield
        except TimeoutError as error:
            self.end()
            raise Lost("no answer in time", ended=True) from error
        except (EOFError, OSError) as error:
            raise Lost(self._death(), ended=True) from error

    def _death(self) -> str:
        self._process.join(5)
        status = self._process.exitcode
        self.end()
        return "its process closed its pipe" if status is None else f"its process ended with status {status}"


def main(talk: socket.socket, order: str) -> None:
    """The process: says that it is ready, or why not; then answers until nobody asks any more."""
    given = json.loads(order)
    os.chdir(given["folder"])  # paths mean here what they mean there
    torch.set_num_threads(1)
    try:
        reward = build(given["name"], given["parameters"])
    except LoopwrightError as error:
        send(talk, {"problem": str(error)})
        return
    send(talk, {})
    with contextlib.suppress(EOFError):
        while True:
            packed = receive(talk)
            assert isinstance(packed, list)
            send(talk, _answered(reward, [_unpacked(each) for each in packed]))


def _answered(reward: Reward, samples: Sequence[Sample]) -> dict[str, object]:
    try:
        return {"scores": _checked(reward(samples), len(samples))}
    except Exception as error:  # whatever a reward raises is its samples' failure, and told
        traceback.print_exc()
        return {"problem": f"{type(error).__name__}: {error}"}


def _checked(scores: Sequence[float | None], count: int) -> list[float | None]:
    plain = [None if score is None else float(score) for score in scores]
    if len(plain) != count:
        raise ValueError(f"{len(plain)} scores for {count} samples")
    if any(score is not None and not math.isfinite(score) for score in plain):
        raise ValueError("a score is no finite number")
    return plain


def _packed(sample: Sample) -> list[object]:
    pixels = sample.frames.numpy()
    return [sample.prompt, list(pixels.shape), pixels.tobytes(), dict(sample.facts)]


def _unpacked(packed: Sequence[object]) -> Sample:
    prompt, shape, data, facts = packed
    assert isinstance(prompt, str) and isinstance(shape, list) and isinstance(data, bytes) and isinstance(facts, dict)
    pixels = np.frombuffer(bytearray(data), np.uint8).reshape(shape)
    return Sample(prompt, torch.from_numpy(pixels), facts)
