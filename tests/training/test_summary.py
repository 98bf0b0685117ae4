"""A run's page and plots say what its metrics do."""

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
from PIL import Image

from loopwright.training.run import read
from loopwright.training.session import train
from loopwright.training.sinks import Csv, table


def test_a_run_leaves_a_page_with_plots_and_all_its_settings(run_of, tmp_path):
    run = run_of(steps=4, data={"held_out": 0.5}, evaluation={"every": 2}, sinks=["tensorboard"])
    train(run)
    output = Path(run.output)
    page = (output / "summary.md").read_text()
    rows = table(output / "metrics.csv")
    assert f"| loss | {rows[1]['loss']:.4f} → {rows[-1]['loss']:.4f} (" in page and "| steps | 4 of 4 |" in page
    plots = sorted(path.name for path in (output / "plots").iterdir())
    assert plots == ["gradient-norm.png", "learning-rate.png", "loss-by-noise.png", "loss.png", "throughput.png"]
    assert all(f"](plots/{name})" in page and Image.open(output / "plots" / name).width > 400 for name in plots)
    (tmp_path / "again.yaml").write_text(page.split("```yaml\n")[1].split("```")[0])
    assert read(tmp_path / "again.yaml") == read(output / "run.yaml")


def test_tensorboard_reads_what_was_written(run_of):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = run_of(steps=3, sinks=["tensorboard"])
    train(run)
    events = EventAccumulator(str(Path(run.output) / "tensorboard"))
    events.Reload()
    rows = table(Path(run.output) / "metrics.csv")
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3]
    assert [event.value for event in events.Scalars("loss")] == pytest.approx([row["loss"] for row in rows], rel=1e-6)


def test_a_metrics_file_goes_on_after_the_step_it_is_continued_from(tmp_path):
    first = Csv(tmp_path / "metrics.csv", 0)
    for step in (1, 2, 3):
        first.write(step, {"loss": step / 4})
    again = Csv(tmp_path / "metrics.csv", 2)
    again.write(3, {"loss": 7.0, "held_out/loss": 0.5})
    again.write(4, {"loss": 8.0})
    expected = [{"step": 1, "loss": 0.25}, {"step": 2, "loss": 0.5}, {"step": 3, "loss": 7, "held_out/loss": 0.5}]
    assert table(tmp_path / "metrics.csv") == [*expected, {"step": 4, "loss": 8}]


@pytest.fixture
def tracker(monkeypatch) -> Callable[[str], list[tuple]]:
    """`tracker("wandb")`: what a package of that name, which is none, is told from now on."""

    def faked(name: str) -> list[tuple]:
        calls: list[tuple] = []
        fake = ModuleType(name)
        fake.__spec__ = ModuleSpec(name, None)
        fake.init = lambda **given: calls.append(("init", given))
        fake.log = lambda metrics, step: calls.append(("log", step, "loss" in metrics))
        fake.finish = lambda: calls.append(("finish",))
        monkeypatch.setitem(sys.modules, name, fake)
        return calls

    return faked


def test_trackers_are_told_of_the_run_and_of_each_step(run_of, plotless, tracker):
    calls = tracker("trackio")
    train(run_of(steps=2, sinks=["trackio"]))
    (_, given), *others = calls
    assert given["project"] == "loopwright" and given["config"]["steps"] == 2
    assert others == [("log", 1, True), ("log", 2, True), ("finish",)]


@pytest.mark.parametrize(("package", "identity"), [("wandb", "id"), ("trackio", "name")])
def test_a_tracker_knows_a_continued_run_again_and_no_other_by_it(
    package, identity, run_of, plotless, tracker, tmp_path
):
    calls = tracker(package)
    for folder, steps in (("a", 1), ("a", 2), ("b", 1)):
        train(run_of(steps=steps, sinks=[package], output=str(tmp_path / folder / "out")))
    begun, continued, other = (call[1] for call in calls if call[0] == "init")
    assert begun["resume"] == continued["resume"] == "allow" and begun["name"].startswith("out-")
    assert begun[identity] == continued[identity] != other[identity] and begun["name"] != other["name"]
    assert ("id" in begun) == (package == "wandb")
    assert [call[1] for call in calls if call[0] == "log"] == [1, 2, 1]
