"""Held-out samples: rewards and judges of the same, how different they are, a sheet to look at."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from loopwright import media
from loopwright.errors import RequestError
from loopwright.rewards import Sample
from loopwright.training.held_out import diversity
from loopwright.training.run import Evaluation
from loopwright.training.session import train
from loopwright.training.sinks import table


@pytest.fixture
def judged(rollout_of, rewards_file):
    """`judged("dim", ...)`: a run on brightness that another function judges."""

    def make(name: str, **settings):
        judges = {f"{rewards_file}:{name}": 1.0}
        return rollout_of(evaluation=Evaluation(every=2, draws=3, judges=judges), **settings)

    return make


def rows_of(run):
    rows = table(Path(run.output) / "metrics.csv")
    return [row for row in rows if "held_out/not_scored/judge" in row]


def test_the_judge_sees_the_very_samples_that_the_reward_sees_also_of_a_run_that_is_continued(judged, rewards_file):
    run = judged("dim", epochs=3, optimiser={"lr": 3e-2}, grpo={"clip": 0.1})
    train(replace(run, epochs=1))
    train(run)
    rows = rows_of(run)
    assert [row["step"] for row in rows] == [0, 2, 4, 6]
    for row in rows:
        assert row["held_out/judge"] == row[f"held_out/{rewards_file}:dim"]
        assert row["held_out/reward"] == row[f"held_out/{rewards_file}:bright"]
        assert row["held_out/judge"] == pytest.approx(1 - row["held_out/reward"], abs=1e-9)
        assert row["held_out/diversity_ratio"] == row["held_out/diversity"] / rows[0]["held_out/diversity"]
    assert rows[-1]["held_out/reward"] != rows[0]["held_out/reward"]
    assert rows[0]["held_out/diversity_ratio"] == 1 != rows[-1]["held_out/diversity_ratio"]
    page = (Path(run.output) / "summary.md").read_text()
    assert "](plots/reward-and-judge.png)" in page and f"| held_out/judge | {rows[0]['held_out/judge']:.4f} →" in page
    assert Image.open(Path(run.output) / "plots/reward-and-judge.png").width > 400


@pytest.mark.parametrize(("decay", "follows"), [(1e-9, True), (1 - 1e-9, False)])
def test_averaged_weights_are_judged_too(judged, decay, follows):
    """Averages that forget at once are the weights in training, and those that never do what training began with."""
    run = judged("dim", epochs=3, optimiser={"lr": 3e-2}, grpo={"clip": 0.1}, ema=decay)
    train(run)
    first, *_, last = rows_of(run)
    assert first["held_out/ema_reward"] == first["held_out/reward"] != last["held_out/reward"]
    same = last if follows else first
    assert last["held_out/ema_reward"] == pytest.approx(same["held_out/reward"], abs=1e-4)
    assert last["held_out/ema_judge"] == pytest.approx(same["held_out/judge"], abs=1e-4)
    assert abs(last["held_out/reward"] - first["held_out/reward"]) > 1e-3
    assert (Path(run.output) / "previews" / "held-out-ema-00000006.png").exists()
    assert "held_out/ema_reward" in (Path(run.output) / "summary.md").read_text()


def test_each_evaluation_leaves_a_sheet_and_what_a_judge_could_not_say_is_left_out_and_counted(judged):
    run, said = judged("mute"), []
    train(run, SimpleNamespace(say=said.append, step=lambda *given: None, encoding=lambda *given: None))
    assert (
        said[0].startswith("after step 0: 6 held-out samples have no judge; ") and "not a finite number (6)" in said[0]
    )
    for row in rows_of(run):
        assert row["held_out/not_scored/judge"] == 6 and row["held_out/not_scored/reward"] == 0
        assert "held_out/judge" not in row and 0 < row["held_out/reward"] < 1
    files = sorted((Path(run.output) / "previews").glob("held-out-*.png"))
    assert [file.name for file in files] == [f"held-out-0000000{step}.png" for step in (0, 2, 4)]
    height, width, _ = media.read_image(files[0]).shape
    assert height / width == pytest.approx(2 / 3, abs=0.02), "two prompts, three samples of each"
    assert media.read_metadata(files[1]) == {"step": 2, "prompts": ["light", "dark"]}


def test_diversity_is_the_mean_distance_of_pairs():
    levels = (0, 0, 255)
    samples = [Sample("x", torch.full((1, 4, 4, 3), level, dtype=torch.uint8)) for level in levels]
    assert diversity(samples) == pytest.approx(2 / 3) and diversity(samples[:2]) == 0


def test_judges_are_of_rollouts(run_of):
    with pytest.raises(RequestError, match=r"evaluation\.judges are of rollouts"):
        run_of(data={"held_out": 0.5}, evaluation={"judges": {"jpeg": 1.0}})
