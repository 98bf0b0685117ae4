"""Timing by the protocol: variants interleaved A B B A, warm-ups left out, medians and spreads, device events.

figures = interleaved({"ours": run_ours, "theirs": run_theirs}, device="cuda", warm=3, rounds=7)
figures["ours"].median          # seconds
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Run = Callable[[], object]


@dataclass(frozen=True)
class Figure:
    """Seconds of each timed run."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def row(self, scale: float = 1e3) -> dict[str, float]:
        """Median and spread, times `scale`."""
        values = [value * scale for value in self.seconds]
        return {"median": statistics.median(values), "least": min(values), "most": max(values), "rounds": len(values)}


def interleaved(runs: Mapping[str, Run], *, device: str, warm: int, rounds: int) -> dict[str, Figure]:
    """Time each of `runs`, in turn and in reverse turn."""
    for run in runs.values():
        for _ in range(warm):
            run()
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(rounds):
        names = list(runs) if index % 2 == 0 else list(runs)[::-1]
        for name in names:
            taken[name].append(seconds(runs[name], device))
    return {name: Figure(tuple(values)) for name, values in taken.items()}


def seconds(run: Run, device: str) -> float:
    """Of one run: from the device's idleness to its idleness."""
    if not device.startswith("cuda"):
        begun = time.perf_counter()
        run()
        return time.perf_counter() - begun
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def small(run: Run, device: str, *, warm: int, rounds: int) -> Figure:
    """Of a run that is short beside its launch: many between two events."""
    many = 20 if device.startswith("cuda") else 1

    def repeated() -> None:
        for _ in range(many):
            run()

    figure = interleaved({"": repeated}, device=device, warm=warm, rounds=rounds)[""]
    return Figure(tuple(value / many for value in figure.seconds))


def recorded(run: Run, device: str, *, warm: int, rounds: int) -> Figure:
    """Of a run's kernels alone, replayed as a graph: without what the host takes to launch them."""
    if not device.startswith("cuda"):
        return small(run, device, warm=warm, rounds=rounds)
    many = 20
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(many):
            run()
    figure = interleaved({"": graph.replay}, device=device, warm=warm, rounds=rounds)[""]
    return Figure(tuple(value / many for value in figure.seconds))


def gemm(device: str, size: int) -> float:
    """FLOP/s of a square bfloat16 product on random values."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / small(lambda: a @ b, device, warm=3, rounds=7).median


def copied(device: str, count: int) -> float:
    """Bytes/s, read and written, of a copy on the device."""
    a = torch.randint(0, 255, (count,), device=device, dtype=torch.uint8)
    b = torch.empty_like(a)
    return 2 * count / small(lambda: b.copy_(a), device, warm=3, rounds=7).median


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """||a - b|| / ||b||."""
    return float((a.double() - b.double()).norm() / b.double().norm())
