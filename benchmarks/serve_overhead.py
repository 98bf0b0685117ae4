"""What HTTP costs over the engine: one image request, through a model in this process and through a server on loopback.

    python benchmarks/serve_overhead.py [--rounds 100] [--steps 4] [--output results.json]

The two take turns, so that what else the machine does meets both. Making a PNG of the pixels and base64 of that is what
an answer's shape asks for, and is measured by itself; what is left is the server's: reading and checking the request,
threads, the queue, events, the answer. Prints medians and spreads in milliseconds; the bound is 5 for the median.
"""

import argparse
import base64
import http.client
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeVar

import torch

from loopwright.api import Model, Result, load
from serving_process import ServerProcess

MODEL = "loopwright/tiny-wan"
BOUND = 5.0
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


def rounds(model: Model, server: ServerProcess, steps: int, count: int, folder: Path) -> list[Round]:
    """Alternating, after three that warm both up. The bytes are the same."""
    asked = {"prompt": "a fox", "size": "64x64", "num_inference_steps": steps, "seed": 3}
    request = model.request("a fox", height=64, width=64, num_frames=1, num_inference_steps=steps, seed=3,
                            mode="fixed", rows=1)  # fmt: skip
    body, connection = json.dumps(asked).encode(), http.client.HTTPConnection("127.0.0.1", server.port)

    def ask() -> bytes:
        connection.request("POST", "/v1/images/generations", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.read()

    measured = []
    for _ in range(count + 3):
        engine, result = timed(model.run, request)
        encoding, image = timed(encoded, result, folder)
        over, answer = timed(ask)
        assert json.loads(answer)["data"][0]["b64_json"].encode() == image
        measured.append(Round(engine, encoding, over))
    return measured[3:]


def summary(name: str, values: Sequence[float]) -> dict[str, float]:
    """Print and give median, quartiles and extremes."""
    low, middle, high = statistics.quantiles(values, n=4)
    print(f"{name:9} {middle:8.2f} ms (quartiles {low:.2f} to {high:.2f}, least {min(values):.2f})")
    return {"median": middle, "quartiles": [low, high], "least": min(values)}


def main() -> int:
    """Print the figures; 1 if the bound does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = load(MODEL, device="cpu")
    with tempfile.TemporaryDirectory() as folder, ServerProcess(MODEL, Path(folder)) as server:
        measured = rounds(model, server, arguments.steps, arguments.rounds, Path(folder))
    names = (*Round._fields, "overhead")
    figures = {name: summary(name, [getattr(one, name) for one in measured]) for name in names}
    if arguments.output:
        arguments.output.write_text(json.dumps({"steps": arguments.steps, "milliseconds": figures}, indent=1) + "\n")
    print(f"bound {BOUND} ms: {'holds' if figures['overhead']['median'] <= BOUND else 'does not hold'}")
    return int(figures["overhead"]["median"] > BOUND)


if __name__ == "__main__":
    sys.exit(main())
