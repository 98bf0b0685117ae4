"""What HTTP costs over the engine: one image request, through a model and through a server of it on loopback.

    python benchmarks/serve_overhead.py [--rounds 200] [--steps 4] [--whole] [--output results.json]

The two take turns, so that what else the machine does meets both. Ops hand back what they computed for such tensors
before, so that all is on but the arithmetic, whose noise is larger than what is measured; with `--whole` they compute,
in a server of its own process. Making a PNG of the pixels and base64 of that is what an answer's shape asks for, and is
measured by itself; what is left is the server's: reading and checking the request, threads, the queue, events, the
answer. Prints medians and spreads in milliseconds; the bound is 5 for the median. Threads are woken ten times a
request: on a machine that does other things as well, that is what is measured.
"""

import argparse
import asyncio
import base64
import http.client
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeVar

import torch

from loopwright.api import Model, Result, load
from loopwright.engine.execute import Call, eager
from loopwright.engine.instance import Instance
from loopwright.engine.store import Store
from loopwright.loop import Tensors
from loopwright.serving.server import bound, server_of
from loopwright.serving.service import Service
from loopwright.serving.settings import Settings
from serving_process import ServerProcess

MODEL = "loopwright/tiny-wan"
BOUND = 5.0
WARM = 5
P, T = ParamSpec("P"), TypeVar("T")


class Round(NamedTuple):
    """Milliseconds of one round."""

    engine: float
    encoding: float
    http: float

    @property
    def overhead(self) -> float:
        return self.http - self.engine - self.encoding


def timed(work: Callable[P, T], *given: P.args, **named: P.kwargs) -> tuple[float, T]:
    """Milliseconds, and what came of it."""
    begun = time.perf_counter()
    result = work(*given, **named)
    return (time.perf_counter() - begun) * 1e3, result


def encoded(result: Result, folder: Path) -> bytes:
    """As an answer carries it."""
    return base64.b64encode(result.save(folder / "image.png").read_bytes())


@contextmanager
def serving(model: Model, folder: Path) -> Iterator[int]:
    """A server of the model in this process; its port."""
    settings = Settings(folder=folder / "served")
    with bound("127.0.0.1", 0) as sock:
        server = server_of(Service([model], settings))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])))
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield sock.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def apart(model: Model, folder: Path) -> Iterator[int]:
    """A server in a process of its own; its port."""
    with ServerProcess(model.source, folder) as server:
        yield server.port


class Remembering:
    """Runs an op once for tensors of the same shapes, and copies its results from then on."""

    def __init__(self) -> None:
        self._made: dict[object, Tensors] = {}

    def __call__(self, instance: Instance, call: Call) -> Tensors:
        key = (call.step.op, *((name, tensor.shape) for name, tensor in call.tensors.items()))
        if key not in self._made:
            self._made[key] = eager(instance, call)
        return {name: tensor.clone() for name, tensor in self._made[key].items()}


def rounds(model: Model, port: int, steps: int, count: int, folder: Path) -> list[Round]:
    """Alternating, after some that warm both up. The bytes are the same."""
    asked = {"prompt": "a fox", "size": "64x64", "num_inference_steps": steps, "seed": 3}
    request = model.request(
        "a fox", height=64, width=64, num_frames=1, num_inference_steps=steps, seed=3, mode="fixed", rows=1
    )
    body, connection = json.dumps(asked).encode(), http.client.HTTPConnection("127.0.0.1", port)

    def ask() -> bytes:
        connection.request("POST", "/v1/images/generations", body, {"Content-Type": "application/json"})
        return connection.getresponse().read()

    measured = []
    for _ in range(count + WARM):
        engine, result = timed(model.run, request)
        encoding, image = timed(encoded, result, folder)
        over, answer = timed(ask)
        assert json.loads(answer)["data"][0]["b64_json"].encode() == image
        measured.append(Round(engine, encoding, over))
    return measured[WARM:]


def summary(name: str, values: Sequence[float]) -> dict[str, float]:
    """Print and give median, quartiles and extremes."""
    low, middle, high = statistics.quantiles(values, n=4)
    print(f"{name:9} {middle:8.2f} ms (quartiles {low:.2f} to {high:.2f}, least {min(values):.2f})")
    return {"median": middle, "quartiles": [low, high], "least": min(values)}


def main() -> int:
    """Print the figures; 1 if the bound does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--whole", action="store_true", help="let ops compute, in a server of its own process")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = load(MODEL, device="cpu", store=Store())  # that writes no prices to disk, as a request alone would
    if not arguments.whole:
        remembering = Remembering()
        Model.execute = property(lambda self: remembering)  # type: ignore[assignment, method-assign]
    start = apart if arguments.whole else serving
    with tempfile.TemporaryDirectory() as folder, start(model, Path(folder)) as port:
        measured = rounds(model, port, arguments.steps, arguments.rounds, Path(folder))
    names = (*Round._fields, "overhead")
    figures = {name: summary(name, [getattr(one, name) for one in measured]) for name in names}
    if arguments.output:
        kept = {"steps": arguments.steps, "whole": arguments.whole, "milliseconds": figures}
        arguments.output.write_text(json.dumps(kept, indent=1) + "\n")
    print(f"bound {BOUND} ms: {'holds' if figures['overhead']['median'] <= BOUND else 'does not hold'}")
    return int(figures["overhead"]["median"] > BOUND)


if __name__ == "__main__":
    sys.exit(main())
