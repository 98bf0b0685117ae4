"""Ten thousand requests of mixed sizes on a simulated clock: what batching and the order of requests are worth.

    python benchmarks/arrivals.py [--requests 10000]

The engine is the real one: jobs, keys, merging, prices. Only time is simulated: a call takes what a device would, from
a table of how long one row of each size takes and how many rows fill the device. Prints the time until all are done,
the median and the 99th percentile of latency, and the mean rows a call, against first come, first served without
batching; once with sizes that mix, once with requests that each fill the device.
"""

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from loopwright.card import Card, Component, Program, Recipe, Stage
from loopwright.engine.execute import Call
from loopwright.engine.instance import Instance, Resident, Store
from loopwright.engine.job import Job
from loopwright.engine.policy import POLICIES, Policy
from loopwright.engine.scheduler import Scheduler
from loopwright.loop import Binding, Env, Result, Step, Tensors, Unit
from loopwright.program import resolve
from loopwright.request import Request

TASK = "text_to_video"


@dataclass(frozen=True)
class Size:
    """One shape of request: its side in pixels, steps, seconds of a lone step, rows that fill the device."""

    side: int
    steps: int
    seconds: float
    full: int

    def cost(self, rows: int) -> float:
        """Seconds of a call: flat until the device is full, then proportional."""
        return self.seconds * max(1.0, rows / self.full)


MIXED = (Size(256, 4, 0.05, 16), Size(512, 6, 0.06, 4), Size(1024, 8, 0.08, 1), Size(1280, 16, 0.5, 1))
SHARES = (60, 28, 10, 2)
FULL = (Size(1024, 8, 0.08, 1),)


def tick(parts: Mapping[str, torch.nn.Module], *, x: torch.Tensor) -> Tensors:
    """A step that does nothing."""
    return {"x": x}


@dataclass(frozen=True, slots=True)
class TickState:
    """Steps left."""

    binding: Binding
    x: torch.Tensor
    left: int


class Ticks:
    """As many steps as the request asks for, on a row whose shape is its size."""

    semantics = "ticks/v1"
    state_type = TickState

    def init(self, request: Request, inputs: Tensors, env: Env) -> TickState:
        return TickState(env.binding, torch.zeros(1, request.height // 128), request.num_inference_steps)

    def next(self, state: TickState) -> Step | None:
        if not state.left:
            return None
        return Step(tick, ("transformer",), state.binding, {"x": state.x}, unit=Unit.DENOISE)

    def advance(self, state: TickState, result: Result) -> tuple[TickState, Tensors]:
        return TickState(state.binding, result.tensors["x"], state.left - 1), {}

    def feed(self, state: TickState, port: str, item: Tensors | None) -> TickState:
        raise ValueError(port)

    def outlook(self, state: TickState) -> Sequence[tuple[Unit, int]]:
        return [(Unit.DENOISE, state.left)]

    def finish(self, state: TickState) -> Tensors:
        return {"latents": state.x}


def instance() -> Instance:
    """A model whose only stage ticks."""
    defaults = {"negative_prompt": "", "height": 256, "width": 256, "num_frames": 1, "num_inference_steps": 1,
                "guidance_scale": 1.0, "guidance_scale_2": None, "flow_shift": None, "strength": 1.0,
                "max_sequence_length": 8, "fps": 8}  # fmt: skip
    card = Card(
        "trace", "trace", {"transformer": Component("trace.Net", dtype="float32")}, {"ticks": "ticks/v1"},
        {TASK: Program((Stage("ticks", "ticks", (), ("latents",), ("transformer",)),), (), {"latents": "latents"})},
        {TASK: defaults}, {"size_multiple": 16, "frame_stride": 4, "experts": ("transformer",)},
        Recipe(assumes=("ticks/v1",)),
    )  # fmt: skip
    model = Instance(card, {"ticks/v1": Ticks()}, Store(0), device="cpu", locate=lambda card, part: Path())  # type: ignore[dict-item]
    model._residents["transformer"] = Resident(("trace",), torch.nn.Identity())
    return model


@dataclass(frozen=True)
class Arrival:
    """A request of the trace and when it comes."""

    at: float
    size: Size


@dataclass(frozen=True)
class Outcome:
    """Seconds: until the last is done, and of latency; and the mean rows a call."""

    makespan: float
    median: float
    tail: float
    rows: float


def trace(sizes: Sequence[Size], shares: Sequence[int], count: int, load: float, seed: int = 0) -> list[Arrival]:
    """Random arrivals that ask for `load` times the device's time if none were batched."""
    rng = random.Random(seed)
    picked = rng.choices(sizes, shares, k=count)
    rate = load * count / sum(size.steps * size.seconds for size in picked)
    now, arrivals = 0.0, []
    for size in picked:
        now += rng.expovariate(rate)
        arrivals.append(Arrival(now, size))
    return arrivals


def simulate(arrivals: Sequence[Arrival], *, policy: Policy, mode: str, rows: int = 32) -> Outcome:
    """Run the trace through the engine on a clock of its own."""
    model = instance()
    template = resolve(model.card, prompt="", seed=0, output="latents", mode=mode)
    sizes = {arrival.size.side // 128: arrival.size for arrival in arrivals}
    clock, calls, served = [0.0], 0, 0

    def execute(model: Instance, call: Call) -> Tensors:
        nonlocal calls, served
        clock[0] += sizes[call.tensors["x"].shape[1]].cost(call.rows)
        calls, served = calls + 1, served + call.rows
        return tick({}, **call.tensors)

    scheduler = Scheduler(policy=policy, execute=execute, rows=rows, clock=lambda: clock[0])
    ended: dict[int, float] = {}
    waiting, live = list(reversed(list(enumerate(arrivals)))), {}
    while waiting or len(scheduler):
        if not len(scheduler):
            clock[0] = max(clock[0], waiting[-1][1].at)
        while waiting and waiting[-1][1].at <= clock[0]:
            number, arrival = waiting.pop()
            size = arrival.size
            request = replace(template, height=size.side, width=size.side, num_inference_steps=size.steps)
            live[number] = scheduler.submit(Job(model, request), arrived=arrival.at)
        scheduler.step()
        for number in [number for number, job in live.items() if job.ended]:
            assert live.pop(number).status == "done"
            ended[number] = clock[0]
    latencies = sorted(ended[number] - arrival.at for number, arrival in enumerate(arrivals))
    return Outcome(clock[0], latencies[len(latencies) // 2], latencies[int(len(latencies) * 0.99)], served / calls)


def report(title: str, arrivals: Sequence[Arrival]) -> dict[str, Outcome]:
    """Run and print all variants of a trace."""
    print(f"{title}: {len(arrivals)} requests\n  {'':<24}makespan    median       p99   rows a call")
    outcomes = {"fifo, no batching": simulate(arrivals, policy=POLICIES["fifo"], mode="exact")}
    outcomes |= {f"{name}, batching": simulate(arrivals, policy=p, mode="throughput") for name, p in POLICIES.items()}
    for name, o in outcomes.items():
        print(f"  {name:<24}{o.makespan:8.1f} s{o.median:8.2f} s{o.tail:8.2f} s{o.rows:8.2f}")
    return outcomes


def main() -> None:
    """Print both traces."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    count = parser.parse_args().requests
    torch.set_num_threads(1)
    report("sizes that mix, load 0.9", trace(MIXED, SHARES, count, 0.9))
    report("each fills the device, load 0.9", trace(FULL, (1,), count, 0.9))


if __name__ == "__main__":
    main()
