"""Two hundred clients of every kind at once against a real server: what it answers, and what it keeps of them.

    python benchmarks/serve_load.py [--clients 200] [--seconds 300] [--seed 1] [--output results.json]

Clients make images (plain, by address, streamed), edits, videos and rollouts, poll, watch, fetch parts, and cancel;
others leave in the middle, send nonsense, send or read a little at a time. A first load warms the server up; then its
memory, threads, open files, cache entries and leased pages are read, the load runs, and they are read again. There may
be no answer that was not meant, no growth, and sampled files must equal byte for byte what a model in this process
makes of the same seed, mode and rows. Prints medians and 99th percentiles by kind. Linux only.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from loopwright.api import Model, load
from serve_clients import BUSY, STOPPING, Crowd, Sample, Tally
from serving_process import ServerProcess

MODEL = "loopwright/tiny-wan"
GROWTH = 0.05  # of memory: what allocators may keep
COMPARED = 40
_FLAGS = ("--max-queue", "256", "--max-per-key", "256")


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a server holds when nobody asks anything of it. `memory` in bytes."""

    memory: int
    threads: int
    files: int
    under_way: float
    scheduled: float
    embeddings: float
    leased: float

    @classmethod
    def of(cls, pid: int, metrics: Mapping[str, float]) -> "Footprint":
        process = Path(f"/proc/{pid}")
        fields = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        names = ("requests_under_way", "jobs_scheduled", "embedding_cache_bytes", "leased_bytes")
        told = (metrics[f"loopwright_{name}"] for name in names)
        return cls(int(fields["VmRSS"].split()[0]) * 1024, int(fields["Threads"]),
                   len(list((process / "fd").iterdir())), *told)  # fmt: skip

    def grown(self, before: "Footprint") -> list[str]:
        """What is more than before."""
        more = [name for name, now in asdict(self).items() if name != "memory" and now > asdict(before)[name]]
        return more + ["memory"] * (self.memory > before.memory * (1 + GROWTH))


async def crowded(crowd: Crowd, clients: int, seconds: float) -> None:
    """So many clients, each exchange after exchange, for so long; then until the last has ended."""
    end = time.monotonic() + seconds

    async def client() -> None:
        while time.monotonic() < end:
            await crowd.one()
            await asyncio.sleep(0.05)

    await asyncio.gather(*(client() for _ in range(clients)))


async def settled(crowd: Crowd, pid: int, before: Footprint | None, patience: float) -> Footprint:
    """What is held once nothing is under way, and idle threads and connections have had the time to go."""
    end = time.monotonic() + patience
    while True:
        found = Footprint.of(pid, await crowd.metrics())
        quiet = not found.under_way and not found.scheduled and (before is None or not found.grown(before))
        if quiet or time.monotonic() > end:
            return found
        await asyncio.sleep(0.5)


async def loaded(
    port: int,
    pid: int,
    tally: Tally,
    *,
    clients: int,
    seconds: float,
    warm: float,
    seed: int,
    kept: float = 0.1,
    patience: float = 30.0,
) -> tuple[Footprint, Footprint]:
    """What is held before and after the load."""
    held: list[Footprint] = []
    for part, (length, counted) in enumerate(((warm, Tally()), (seconds, tally))):
        crowd = Crowd("127.0.0.1", port, counted, random.Random(seed + part), kept)
        await crowded(crowd, clients, length)
        await crowd.close()
        watch = Crowd("127.0.0.1", port, Tally(), random.Random(0))
        if part == 0:
            await settled(watch, pid, None, patience)
            await asyncio.sleep(min(12.0, warm))  # idle threads of routes end after ten seconds
        held.append(await settled(watch, pid, held[0] if held else None, patience))
        await watch.close()
    return held[0], held[1]


def differing(model: Model, samples: Sequence[Sample], folder: Path) -> list[Sample]:
    """Those whose file this model does not make, alone and one after another."""
    wrong = []
    for index, sample in enumerate(samples):
        given = dict(sample.given)
        result = model.run(model.request(str(given.pop("prompt")), **given))
        if result.save(folder / f"{index}{sample.suffix}").read_bytes() != sample.content:
            wrong.append(sample)
    return wrong


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Count, median and 99th percentile."""
    cuts = statistics.quantiles(seconds, n=100, method="inclusive") if len(seconds) > 1 else [seconds[0]] * 99
    return {"count": len(seconds), "p50": round(cuts[49], 4), "p99": round(cuts[98], 4)}


def judged(tally: Tally, before: Footprint, after: Footprint, wrong: Sequence[Sample], log: str) -> list[str]:
    """Everything that should not be."""
    statuses = sum(tally.statuses.values(), Counter())
    faults = [status for status in statuses if status >= 500 and status != STOPPING]
    return [
        *(f"{count} times: {problem}" for problem, count in Counter(tally.problems).items()),
        *(f"status {status}: {statuses[status]} times" for status in faults),
        *(f"{name} grew from {asdict(before)[name]} to {asdict(after)[name]}" for name in after.grown(before)),
        *(f"other bytes than alone: {sample.given}" for sample in wrong),
        *(f"in the server's log: {line}" for line in log.splitlines() if "Traceback" in line or "rror" in line[:60]),
    ]


def told(
    tally: Tally, before: Footprint, after: Footprint, compared: int, problems: Sequence[str]
) -> dict[str, object]:
    """Print it all, and give it as data."""
    kinds = {kind: percentiles(seconds) for kind, seconds in sorted(tally.seconds.items())}
    for kind, row in kinds.items():
        statuses = ", ".join(f"{status}: {count}" for status, count in sorted(tally.statuses[kind].items()))
        print(f"{kind:18} {row['count']:6.0f}  p50 {row['p50']:8.3f} s  p99 {row['p99']:8.3f} s  {statuses}")
    statuses = sum(tally.statuses.values(), Counter())
    print(f"{statuses.total()} answers; busy (429): {statuses[BUSY]}; stopping (503): {statuses[STOPPING]}")
    print(f"held before: {before}\nheld after:  {after}\n{compared} files compared")
    print("\n".join(problems) or "nothing that should not be")
    return {
        "kinds": {kind: row | {"statuses": dict(tally.statuses[kind])} for kind, row in kinds.items()},
        "before": asdict(before),
        "after": asdict(after),
        "compared": compared,
        "problems": list(problems),
    }


def main() -> int:
    """Run it; 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--warm", type=float, default=40.0, help="seconds of the load that comes first")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tally = Tally()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with ServerProcess(MODEL, folder, *_FLAGS) as server:
            before, after = asyncio.run(
                loaded(server.port, server.pid, tally, clients=arguments.clients, seconds=arguments.seconds,
                       warm=arguments.warm, seed=arguments.seed)
            )  # fmt: skip
        samples = random.Random(arguments.seed).sample(tally.samples, min(COMPARED, len(tally.samples)))
        wrong = differing(load(MODEL, device="cpu"), samples, folder)
        problems = judged(tally, before, after, wrong, server.log.read_text())
    figures = told(tally, before, after, len(samples), problems)
    if arguments.output:
        kept = {"clients": arguments.clients, "seconds": arguments.seconds, "seed": arguments.seed, **figures}
        arguments.output.write_text(json.dumps(kept, indent=1) + "\n")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
