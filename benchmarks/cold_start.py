"""How long a model takes to be ready, and what memory that costs: ours against diffusers' `from_pretrained().to()`.

    python benchmarks/cold_start.py [MODEL] [--device cuda] [--memory high] [--rounds 4] [--output result.json]

MODEL is a Diffusers folder or a shipped id. Each load is a process of its own, in the order A B B A, after one of each
that is not counted (it fills the page cache). Seconds run from the first call to weights on the device, imports left
out; with memory high every weight is read there once. With low ours is held against `enable_model_cpu_offload`. "host"
is the most memory the process ever had resident beyond what it had after its imports, pages of mapped weight files
among them; "device" is torch's peak. Prints medians and spreads.
"""

import argparse
import gc
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loopwright.card import Card

SIDES = ("loopwright", "diffusers")
FIGURES = ("seconds", "host_bytes", "device_bytes")


def loopwright_side(model: str, device: str, memory: str) -> dict[str, float]:
    from loopwright.api import load

    warm(model, device)
    before, begun = resident(), time.perf_counter()
    loaded = load(model, device=device, memory=memory)
    for name in loaded.card.components:
        loaded.instance.part(name)
    if memory == "high":
        weighted = tuple(name for name, component in loaded.card.components.items() if component.dtype)
        with loaded.instance.using(weighted) as parts:
            touch(parts.values())
    return figures(device, before, begun)


def diffusers_side(model: str, device: str, memory: str) -> dict[str, float]:
    import torch

    from loopwright import catalog

    card, pipeline_class = warm(model, device)
    folder = Path(catalog.SHIPPED.get(model, model))
    dtypes = {name: getattr(torch, part.dtype) for name, part in card.components.items() if part.dtype}
    before, begun = resident(), time.perf_counter()
    pipeline = pipeline_class.from_pretrained(folder, torch_dtype=dtypes)
    if memory == "high":
        pipeline = pipeline.to(device)
        touch(module for module in pipeline.components.values() if isinstance(module, torch.nn.Module))
    else:
        pipeline.enable_model_cpu_offload(device=device)
    return figures(device, before, begun)


def touch(modules) -> None:
    """Read every weight, so that pages that are only mapped count on either side."""
    for module in modules:
        for tensor in module.parameters():
            tensor.sum()


def warm(model: str, device: str) -> "tuple[Card, type]":
    """Everything that either side imports, and the device's context. Gives the card as it runs, and the pipeline."""
    import diffusers
    import torch
    import transformers
    from diffusers.utils import logging

    from loopwright import catalog
    from loopwright.api import load

    for voice in (logging, transformers.utils.logging):
        voice.set_verbosity_error()
        voice.disable_progress_bar()
    card = load(model, device=device).card  # reads no weights
    for component in card.components.values():
        library, _, name = component.kind.rpartition(".")
        getattr({"diffusers": diffusers, "transformers": transformers}[library], name)
    index = json.loads((Path(catalog.SHIPPED.get(model, model)) / "model_index.json").read_text())
    torch.zeros(1, device=device)
    gc.collect()
    gc.freeze()  # a collection of all that was imported takes longer than loading a small model, and hits one side
    return card, getattr(diffusers, index["_class_name"])


def resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def figures(device: str, before: int, begun: float) -> dict[str, float]:
    import torch

    from loopwright.backends.usage import settle

    settle(device)
    seconds = time.perf_counter() - begun
    device_bytes = torch.cuda.max_memory_allocated(device) if device.startswith("cuda") else 0
    return {"seconds": seconds, "host_bytes": resident() - before, "device_bytes": device_bytes}


def in_a_process(side: str, arguments: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, __file__, arguments.model, "--device", arguments.device, "--memory", arguments.memory]
    done = subprocess.run([*command, "--side", side], check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def order(rounds: int) -> list[str]:
    """A B B A A B B A ..."""
    return [side for i in range(rounds) for side in (SIDES if i % 2 == 0 else SIDES[::-1])]


def row(side: str, measured: Sequence[dict[str, float]]) -> str:
    cells = []
    for name in FIGURES:
        values = [figure[name] / (1 if name == "seconds" else 2**30) for figure in measured]
        cells.append(f"{statistics.median(values):9.3f}  ({min(values):.3f} to {max(values):.3f})".ljust(30))
    return f"{side:<12}{''.join(cells)}".rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="loopwright/tiny-wan")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--memory", default="high", choices=("high", "low"))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        run = loopwright_side if arguments.side == "loopwright" else diffusers_side
        print(json.dumps(run(arguments.model, arguments.device, arguments.memory)))
        return
    for side in SIDES:
        in_a_process(side, arguments)
    measured: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for side in order(arguments.rounds):
        measured[side].append(in_a_process(side, arguments))
    print(f"{arguments.model} on {arguments.device}, memory {arguments.memory}, {arguments.rounds} processes a side")
    print(f"{'':<12}{'seconds':<30}{'host GiB':<30}device GiB")
    for side in SIDES:
        print(row(side, measured[side]))
    if arguments.output:
        arguments.output.write_text(json.dumps(measured, indent=1))


if __name__ == "__main__":
    main()
