"""A run is read from YAML or Python, written back whole, and contradictions in it are told."""

import json

import pytest
import yaml

from loopwright.errors import RequestError
from loopwright.training.run import Run, read, text
from loopwright.training.settings import build

DATA = {"dataset": "clips", "encoder_checkpoint": "loopwright/tiny-wan", "cache": "encoded"}
LEAST = {"model": "loopwright/tiny-wan", "output": "out", "epochs": 1, "data": DATA}


def test_what_a_run_is_written_as_reads_as_the_same_run(tmp_path):
    run = build(Run, {**LEAST, "lora": {"rank": 4}, "previews": {"prompts": ["a: fox"], "parameters": {"height": 64}}})
    (tmp_path / "run.yaml").write_text(text(run))
    assert read(tmp_path / "run.yaml") == run


def test_python_leaves_a_run_and_the_command_line_changes_it(tmp_path):
    file = tmp_path / "run.py"
    file.write_text(
        "from loopwright.training.run import Data, Run\n"
        "run = Run('loopwright/tiny-wan', 'out', Data('clips', 'loopwright/tiny-wan', 'encoded'), steps=3)\n"
    )
    assert read(file).steps == 3
    changed = read(file, ["optimiser.lr=3e-4", "lora.rank=8", "data.held_out=0.1"])
    assert (changed.optimiser.lr, changed.lora.rank, changed.data.held_out, changed.steps) == (3e-4, 8, 0.1, 3)
    file.write_text("runs = 3\n")
    with pytest.raises(RequestError, match="leaves no run"):
        read(file)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": None}, "a run's length is given once: 'neither'; choices: steps, epochs"),
        ({"steps": 5}, "a run's length is given once: 'both'"),
        ({"epochs": 0}, "epochs must be at least 1: 0"),
        ({"batch_size": 0}, "batch_size must be at least 1: 0"),
        ({"batch_size": 2, "accumulate": 3}, "accumulate must be between 1 and batch_size (2): 3"),
        ({"ema": 1.0}, "ema must be between 0 and 1: 1.0"),
        ({"optimiser": {"lr": 0}}, "optimiser.lr must be above 0: 0.0"),
        ({"optimiser": {"betas": [0.9, 1]}}, "optimiser.betas must be at least 0, below 1"),
        ({"optimiser": {"clip": -1}}, "optimiser.clip must be above 0"),
        ({"schedule": {"kind": "cosnie"}}, "unknown schedule.kind: 'cosnie'; choices: constant, linear, cosine"),
        ({"schedule": {"warmup": -1}}, "schedule.warmup must be at least 0"),
        ({"sft": {"caption_dropout": 2}}, "sft.caption_dropout must be between 0 and 1: 2.0"),
        ({"sft": {"shift": 0}}, "sft.shift must be above 0"),
        ({"lora": {"rank": 0}}, "lora.rank must be at least 1"),
        ({"lora": {"targets": []}}, "lora.targets must be one pattern at least"),
        ({"evaluation": {}}, "evaluation needs rows held out"),
        ({"previews": {"prompts": ["a"]}, "train_only": True}, "previews need an engine: 'train_only'"),
        (
            {"previews": {"prompts": ["a"], "parameters": {"image": "x.png"}}},
            "previews.parameters take no image: 'x.png'; set previews.image",
        ),
        ({"sinks": ["wandb", "wandb"]}, "sinks names one twice"),
        ({"sinks": ["paper"]}, "unknown sinks[0]: 'paper'; choices: tensorboard, trackio, wandb"),
        ({"checkpoints": {"keep": 0}}, "checkpoints.keep must be at least 1"),
        ({"method": "dpo"}, "unknown method: 'dpo'; choices: sft"),
    ],
)
def test_contradictions_and_impossible_values_are_named(changes, message):
    values = {name: value for name, value in {**LEAST, **changes}.items()}
    with pytest.raises(RequestError) as error:
        build(Run, values)
    assert message in str(error.value)


@pytest.mark.parametrize(("content", "message"), [("[1]", "holds no settings"), ("a: [", "is not YAML")])
def test_a_file_that_is_no_run_is_told(content, message, tmp_path):
    (tmp_path / "run.yaml").write_text(content)
    with pytest.raises(RequestError, match=message):
        read(tmp_path / "run.yaml")
    with pytest.raises(RequestError, match="cannot read"):
        read(tmp_path / "none.yaml")


def test_json_is_read_too(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps(LEAST))
    assert read(tmp_path / "run.json") == build(Run, yaml.safe_load(yaml.safe_dump(LEAST)))
