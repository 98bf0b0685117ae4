"""A run's page and plots say what its metrics do."""

import sys
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


def test_trackers_are_told_of_the_run_and_of_each_step(run_of, monkeypatch):
    calls: list[tuple] = []
    fake = ModuleType("trackio")
    fake.__spec__ = ModuleSpec("trackio", None)
    fake.init = lambda **given: calls.append(("init", given["project"], given["config"]["steps"]))
    fake.log = lambda metrics, step: calls.append(("log", step, "loss" in metrics))
    fake.finish = lambda: calls.append(("finish",))
    monkeypatch.setitem(sys.modules, "trackio", fake)
    train(run_of(steps=2, sinks=["trackio"]))
    assert calls == [("init", "loopwright", 2), ("log", 1, True), ("log", 2, True), ("finish",)]
