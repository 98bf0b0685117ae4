"""A small data set, its encodings by a tiny checkpoint, and runs on them."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from encoded import write_rows
from loopwright.distributed.group import Group, joined
from loopwright.training.run import Run
from loopwright.training.settings import build

RunOf = Callable[..., Run]


@pytest.fixture(scope="session")
def rows_file(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("clips"), 5)


@pytest.fixture(scope="session")
def warm_caches(tmp_path_factory) -> Path:
    """Folders of encodings, by the kind of the checkpoint that made them; filled by whichever run comes first."""
    return tmp_path_factory.mktemp("encodings")


@pytest.fixture
def run_of(rows_file, checkpoint, warm_caches, tmp_path) -> RunOf:
    """`run_of(kind, **settings)`: a run of a few steps on the CPU, with settings of the data by `data={...}`."""

    def make(kind: str = "t2v", data: dict | None = None, **settings: object) -> Run:
        folder = str(checkpoint(kind))
        given = {
            "dataset": str(rows_file),
            "encoder_checkpoint": folder,
            "cache": str(warm_caches / kind),
            "geometry": ["32x32x5"],
            **(data or {}),
        }
        length = {} if {"steps", "epochs"} & set(settings) else {"epochs": 2}
        plain = {"model": folder, "output": str(tmp_path / "out"), "batch_size": 3, "device": "cpu", "sinks": []}
        return build(Run, {**plain, **length, **settings, "data": given})

    return make


@pytest.fixture
def alone() -> Iterator[Group]:
    """This process as a group."""
    with joined("cpu") as group:
        yield group


@pytest.fixture
def copied() -> Callable[[Path, Path], Path]:
    return lambda source, target: Path(shutil.copytree(source, target))
