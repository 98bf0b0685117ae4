"""What `generate` prints of a result: the files, and everything that made them.

    outputs/a-fox-7.mp4
      model       loopwright/tiny-wan
      seed        7

With --json the same on one line.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Usage:
    """How this run placed its weights, and the most bytes in use so far: of a device, or of the process."""

    memory: str
    peak: int
    of: str


def as_json(files: Sequence[Path], record: Mapping[str, object], seconds: Mapping[str, float], usage: Usage) -> str:
    """One line."""
    values = {
        "files": [str(file) for file in files],
        **record,
        "seconds": seconds,
        "memory": usage.memory,
        "peak_memory": {"bytes": usage.peak, "of": usage.of},
    }
    return json.dumps(values, ensure_ascii=True)


def as_text(
    files: Sequence[Path],
    record: Mapping[str, object],
    seconds: Mapping[str, float],
    usage: Usage,
    notes: Mapping[str, str],
) -> str:
    """A line a file, then a line a value; `notes` are added to the values of those names."""
    values = {name: value for name, value in record.items() if name != "request"}
    request = record["request"]
    assert isinstance(request, Mapping)
    values |= {name: value for name, value in request.items() if name != "model"}
    values["seconds"] = ", ".join(f"{name} {value:.2f}" for name, value in seconds.items())
    values["memory"] = usage.memory
    values["peak_memory"] = f"{as_size(usage.peak)} {'on' if usage.of.startswith('cuda') else 'of'} {usage.of}"
    width = max(map(len, values))
    lines = [f"  {name:<{width}}  {_plain(value)}{notes.get(name, '')}" for name, value in values.items()]
    return "\n".join([*map(str, files), *lines])


def as_size(count: int) -> str:
    """Bytes for people."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def _plain(value: object) -> str:
    if isinstance(value, list):
        return "; ".join(map(_plain, value)) or "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {item}" for name, item in value.items())
    return "-" if value in (None, "") else " ".join(str(value).split())
