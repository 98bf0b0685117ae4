"""Where metrics go: a CSV file, TensorBoard, trackio, wandb.

    sinks = opened(run, output, step=0)
    for sink in sinks: sink.write(1, {"loss": 0.3})

A run that is continued goes on in the same places. What was written after the step it continues from is taken back in
files; trackers keep it, and the same values come again.
"""

import csv
import importlib
import io
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from ..files import replacing
from .run import Run
from .settings import plain

METRICS, IDENTITY = "metrics.csv", "tracker-id"


class Sink(Protocol):
    """Takes the metrics of steps, counted from 1."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def opened(run: Run, output: Path, step: int) -> list[Sink]:
    """The sinks of a run of which so many steps are done; a CSV file is always among them."""
    others = [TensorBoard(output, step) if name == "tensorboard" else Tracker(name, run, output) for name in run.sinks]
    return [Csv(output / METRICS, step), *others]


def table(path: Path) -> list[dict[str, float]]:
    """The rows of a metrics file, without the cells that are empty."""
    with path.open(newline="", encoding="utf-8") as file:
        return [{name: float(cell) for name, cell in row.items() if cell} for row in csv.DictReader(file)]


class Csv:
    """A line a step. A name that comes up later becomes a column of its own."""

    def __init__(self, path: Path, step: int) -> None:
        self._path = path
        kept = [row for row in table(path) if row["step"] <= step] if path.exists() else []
        self._columns = list(dict.fromkeys(["step", *(name for row in kept for name in row)]))
        self._rewrite(kept)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        row = {"step": step, **metrics}
        if new := [name for name in row if name not in self._columns]:
            before = table(self._path)
            self._columns += new
            self._rewrite(before)
        with self._path.open("a", newline="", encoding="utf-8") as file:
            file.write(_lines(self._columns, [row]))

    def close(self) -> None: ...

    def _rewrite(self, rows: Sequence[Mapping[str, float]]) -> None:
        head = ",".join(self._columns) + "\n"
        with replacing(self._path) as temporary:
            temporary.write_text(head + _lines(self._columns, rows), encoding="utf-8")


class TensorBoard:
    """Event files in `tensorboard/`."""

    def __init__(self, output: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(output / "tensorboard"), purge_step=step + 1)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Tracker:
    """trackio or wandb, which share an interface, but that runs are found again by their name or by their id."""

    def __init__(self, package: str, run: Run, output: Path) -> None:
        self._module = importlib.import_module(package)
        identity = _identity(output)
        given = {"id": identity} if package == "wandb" else {}
        name = f"{output.resolve().name}-{identity}"
        self._module.init(project="loopwright", name=name, config=plain(run), resume="allow", **given)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._module.log(dict(metrics), step=step)

    def close(self) -> None:
        self._module.finish()


def _identity(output: Path) -> str:
    """What tells this run from all others, whatever their folders are called; kept in its own."""
    file = output / IDENTITY
    if not file.exists():
        with replacing(file) as temporary:
            temporary.write_text(uuid.uuid4().hex[:12], encoding="utf-8")
    return file.read_text(encoding="utf-8")


def _lines(columns: Sequence[str], rows: Sequence[Mapping[str, float]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    for row in rows:
        writer.writerow({**row, "step": int(row["step"])})
    return text.getvalue()
