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
    changed = read(file, ["optimiser.lr=3e-4", "lora.rank=8", "data.held_out=0.1", "evaluation.every=5"])
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
        ({"grpo": {"clip": 1e-2}}, "method sft does not read grpo.clip: [0.01]; leave grpo out, or set method to grpo"),
        ({"nft": {"beta": 0.5, "kl": 0.0}}, "method sft does not read nft.beta and nft.kl: [0.5, 0.0]"),
        ({"autoencoder": {"kl_weight": 0.0}}, "method sft does not read autoencoder.kl_weight"),
        (
            {"schedule": {"final": 0.1}},
            "schedule.final is of a rate that falls: 0.1; leave it out, or set schedule.kind",
        ),
        (
            {"sft": {"sampling": "uniform", "logit_std": 1.4}},
            "sft.logit_std has no meaning under sampling uniform: 1.4",
        ),
        ({"sft": {"sampling": "mode", "logit_mean": 0.5}}, "sft.logit_mean has no meaning under sampling mode: 0.5"),
        (
            {"sft": {"mode_scale": 0.5}},
            "has no meaning under sampling logit_normal: 0.5; leave it out, or set sft.samp",
        ),
        (
            {"data": {**DATA, "held_out": 0.1}},
            "data.held_out keeps rows that nothing reads: 0.1; leave it out, or give",
        ),
        (
            {"stored": "bfloat16", "lora": {}},
            "stored is of whole networks, and lora trains adapters: 'bfloat16'; leave",
        ),
        ({"data": {**DATA, "workers": 0}}, "data.workers must be at least 1: 0"),
        ({"data": {**DATA, "crop": "top"}}, "unknown data.crop: 'top'; choices: center, none"),
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


def test_settings_of_another_method_may_be_written_out_as_they_are_anyway():
    run = build(Run, {**LEAST, "grpo": {"kl": 0.04}, "schedule": {"kind": "constant", "final": 0.0}})
    assert build(Run, yaml.safe_load(text(run))) == run


def test_json_is_read_too(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps(LEAST))
    assert read(tmp_path / "run.json") == build(Run, yaml.safe_load(yaml.safe_dump(LEAST)))
