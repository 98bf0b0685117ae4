"""What `generate` prints of a result: the files, and everything that made them.

    outputs/a-fox-7.mp4
      model       loopwright/tiny-wan
      seed        7

With --json the same on one line.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path


def as_json(files: Sequence[Path], record: Mapping[str, object], seconds: Mapping[str, float]) -> str:
    """One line."""
    return json.dumps({"files": [str(file) for file in files], **record, "seconds": seconds}, ensure_ascii=True)


def as_text(
    files: Sequence[Path], record: Mapping[str, object], seconds: Mapping[str, float], notes: Mapping[str, str]
) -> str:
    """A line a file, then a line a value; `notes` are added to the values of those names."""
    values = {name: value for name, value in record.items() if name != "request"}
    request = record["request"]
    assert isinstance(request, Mapping)
    values |= {name: value for name, value in request.items() if name != "model"}
    values["seconds"] = ", ".join(f"{name} {value:.2f}" for name, value in seconds.items())
    width = max(map(len, values))
    lines = [f"  {name:<{width}}  {_plain(value)}{notes.get(name, '')}" for name, value in values.items()]
    return "\n".join([*map(str, files), *lines])


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {item}" for name, item in value.items())
    return "-" if value in (None, "") else " ".join(str(value).split())
