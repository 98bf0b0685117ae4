"""What may differ between a run and its continuation, and what may not: told by its file, before anything is loaded."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from loopwright.errors import StateError
from loopwright.training import continuation
from loopwright.training.run import Run, Schedule, read, text
from loopwright.training.session import train


@pytest.fixture
def begun(run_of):
    """`begun(run)`: that run, with a folder in which it has been begun."""

    def begin(**settings) -> Run:
        run = run_of(epochs=2, **settings)
        Path(run.output).mkdir()
        (Path(run.output) / continuation.RUN).write_text(text(run))
        return run

    return begin


@pytest.mark.parametrize("length", [{"epochs": 3}, {"steps": 4, "epochs": None}])
@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_a_run_whose_rates_depend_on_its_length_keeps_it(kind, length, begun):
    run = begun(schedule={"kind": kind})
    told = rf"another {next(iter(length))}: \d; it was .*: set it back .* or choose another output; its rates were of"
    with pytest.raises(StateError, match=rf"{told} .* schedule\.kind is {kind}"):
        continuation.check(replace(run, **length))


def test_a_run_of_constant_rates_may_be_made_longer(begun):
    run = begun(schedule={"warmup": 1})
    continuation.check(replace(run, epochs=3))
    with pytest.raises(StateError, match=r"another schedule\.kind: 'cosine'; it was 'constant'"):
        continuation.check(replace(run, epochs=3, schedule=Schedule("cosine", warmup=1)))


@pytest.mark.parametrize(
    "change", [{"workers": 4}, {"park": True}, {"dedicated": True}, {"cache": "c"}, {"dataset": "d"}]
)
def test_who_encodes_and_where_data_lies_are_free(change, begun):
    run = begun()
    continuation.check(replace(run, data=replace(run.data, **change)))


def test_other_shapes_are_not_free(begun):
    run = begun()
    with pytest.raises(StateError, match=r"another data\.geometry"):
        continuation.check(replace(run, data=replace(run.data, geometry=("32x32x1",))))


def test_a_data_set_that_has_moved_is_continued_and_another_is_not(run_of, tmp_path, plotless):
    run = run_of(steps=1)
    train(run)
    moved = shutil.copytree(Path(run.data.dataset).parent, tmp_path / "moved") / Path(run.data.dataset).name
    longer = replace(run, steps=2, data=replace(run.data, dataset=str(moved)))
    assert train(longer).step == 2
    moved.write_text("".join(moved.read_text().splitlines(keepends=True)[:3]))
    with pytest.raises(StateError, match="saw its rows in another order"):
        train(replace(longer, steps=3))
    assert read(Path(run.output) / continuation.RUN).steps == 2, "what was refused has left no trace"
