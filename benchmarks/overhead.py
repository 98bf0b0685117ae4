"""What the engine costs per step: eight interleaved requests whose op does nothing, divided by their steps.

    python benchmarks/overhead.py [--rounds 7] [--steps 1000]

Everything around the op is on: next, key, dispatch, reads, advance, events, the runner's turn. Prints the median and
spread of the rounds; the bound this project holds itself to is 50 microseconds.
"""

import argparse
import statistics
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from loopwright.api import load
from loopwright.engine.job import Job
from loopwright.engine.scheduler import Scheduler
from loopwright.loops import denoise


def nothing(parts: Mapping[str, torch.nn.Module], *, latents: torch.Tensor, **more: object) -> dict[str, torch.Tensor]:
    """The op that does nothing: hands back what it was given, the solver's history included."""
    return {"latents": latents, "finite": TRUE, **more}


TRUE = torch.ones(1, dtype=torch.bool)


def measure(steps: int, requests: int = 8) -> float:
    """Microseconds per step of one round."""
    model = load("loopwright/tiny-wan", device="cpu")
    denoise.denoise_step = nothing  # the loop finds its op by this name
    events: list[object] = []
    runner = Scheduler()
    for seed in range(requests):
        request = model.request("a fox", seed=seed, num_inference_steps=steps, output="latents")
        runner.submit(Job(model.instance, request, listener=events.append))
    for _ in range(4 * requests):  # encoders and the first steps
        runner.step()
    before = len(events)
    begun = time.perf_counter()
    runner.run()
    seconds = time.perf_counter() - begun
    return seconds / (len(events) - before) * 1e6


def main() -> None:
    """Print the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=1000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures = [measure(arguments.steps) for _ in range(arguments.rounds)]
    middle = statistics.median(figures)
    print(f"{Path(__file__).name}: {middle:.1f} us a step (rounds {min(figures):.1f} to {max(figures):.1f}; bound 50)")


if __name__ == "__main__":
    main()
