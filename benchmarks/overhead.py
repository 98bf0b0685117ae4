"""What the engine costs per step: eight interleaved requests whose op does nothing, divided by their steps.

    python benchmarks/overhead.py [--rounds 7] [--steps 1000]

Everything around the op is on: next, key, dispatch, reads, advance, events, the runner's turn. Taking turns, and by the
scheduler that users get, which also learns prices and forecasts. Prints the median and spread of the rounds; the bound
this project holds itself to is 50 microseconds.
"""

import argparse
import statistics
import time
from collections.abc import Mapping

import torch

from loopwright.api import Model, load
from loopwright.engine.events import Stepped
from loopwright.engine.job import Job
from loopwright.engine.runner import Interleaved, Serial
from loopwright.engine.scheduler import Scheduler
from loopwright.loop import Unit
from loopwright.loops import denoise


def nothing(parts: Mapping[str, torch.nn.Module], *, latents: torch.Tensor, **more: object) -> dict[str, torch.Tensor]:
    """The op that does nothing: hands back what it was given, the solver's history included."""
    return {"latents": latents, "finite": TRUE, **more}


TRUE = torch.ones(1, dtype=torch.bool)


def measure(model: Model, kind: type[Serial] | type[Scheduler], steps: int, requests: int = 8) -> float:
    """Microseconds per step of one round. Encoding and each request's first step are over before it begins."""
    events: list[object] = []
    runner = kind()
    for seed in range(requests):
        request = model.request("a fox", seed=seed, num_inference_steps=steps, output="latents")
        job = Job(model.instance, request, listener=events.append)
        while not any(isinstance(event, Stepped) and event.unit is Unit.DENOISE for event in events[-1:]):
            job.step()
        runner.submit(job)
    before = len(events)
    begun = time.perf_counter()
    runner.run()
    seconds = time.perf_counter() - begun
    return seconds / (len(events) - before) * 1e6


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=1000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = load("loopwright/tiny-wan", device="cpu")
    denoise.denoise_step = nothing  # the loop finds its op by this name
    figures: dict[str, list[float]] = {"Interleaved": [], "Scheduler": []}
    for _ in range(arguments.rounds):
        for kind in (Interleaved, Scheduler):
            figures[kind.__name__].append(measure(model, kind, arguments.steps))
    for name, rounds in figures.items():
        middle = statistics.median(rounds)
        print(f"{name}: {middle:.1f} us a step (rounds {min(rounds):.1f} to {max(rounds):.1f}; bound 50)")


if __name__ == "__main__":
    main()
