"""List the devices of this machine and the kernels each can run, with the reason where it cannot.

Attention is chosen with --attention, the fused kernels together with --kernels fused, 8-bit products with --dtype
float8. Kernels without a backward pass are for generating, not for training.
"""

import argparse
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .table import table

if TYPE_CHECKING:
    from ..backends.device import Probe

NAME, HELP = "backends", "list devices, and which kernels run on them"
_DEVICE = ("device", "architecture", "name", "precision", "reason")
_KERNEL = ("device", "kernel", "kind", "available", "reason", "precisions", "backward", "what")
Row = dict[str, str | bool | list[str]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("--json", action="store_true", help="one JSON object a line")


def run(arguments: argparse.Namespace) -> int:
    """Print the tables."""
    from ..backends.device import available, probe

    probes = [probe(name) for name in available() if name != "cuda"]  # that is the first of those with a number
    devices, kernels = [_device(one) for one in probes], [row for one in probes for row in _kernels(one)]
    if arguments.json:
        for row in (*devices, *kernels):
            print(json.dumps(row))
    else:
        print(_shown(_DEVICE, devices), _shown(_KERNEL, kernels), sep="\n\n")
    return 0


def _device(probe: "Probe") -> Row:
    from ..backends.device import preferred_dtype

    return {
        "device": probe.device,
        "architecture": probe.arch,
        "name": probe.name,
        "precision": preferred_dtype(probe.device),
        "reason": probe.unusable,
    }


def _kernels(probe: "Probe") -> Iterator[Row]:
    from ..backends.registry import manifest, precisions

    for kernel, reason in manifest(probe):
        yield {
            "device": probe.device,
            "kernel": kernel.name,
            "kind": kernel.kind,
            "available": not reason,
            "reason": reason,
            "precisions": list(precisions(kernel, probe)),
            "backward": kernel.backward,
            "what": kernel.summary,
        }


def _shown(heads: tuple[str, ...], rows: list[Row]) -> str:
    return table([heads, *([_cell(row[head]) for head in heads] for row in rows)])


def _cell(value: str | bool | list[str]) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return (", ".join(value) if isinstance(value, list) else value) or "-"
