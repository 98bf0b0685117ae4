"""A run from beginning to end: exact resuming, warm caches, train-only, and a result that is served."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import workers
from safetensors.torch import load_file

import loopwright
import tiny
from loopwright import catalog, encoders, media
from loopwright.card import load_card
from loopwright.distributed.launch import launch
from loopwright.engine import instance
from loopwright.engine.instance import Store
from loopwright.errors import LoopwrightError, ModelError, StateError
from loopwright.training import session
from loopwright.training.run import Optimiser, Run, text
from loopwright.training.session import Silent, train
from loopwright.training.sinks import table

FULL = {
    **{"epochs": 4, "accumulate": 2, "ema": 0.9, "gradient_checkpointing": True},
    **{"schedule": {"kind": "cosine", "warmup": 2}, "checkpoints": {"every": 2}, "optimiser": {"lr": 1e-3}},
    **{"data": {"held_out": 0.5}, "evaluation": {"every": 3, "draws": 2}},
}
LORA = {**FULL, "lora": {"rank": 2, "dropout": 0.2}, "gradient_checkpointing": False}
MEASURED = ("loss", "grad_norm", "lr", "held_out/loss", "held_out/ema_loss")


class StopAfter(Silent):
    """Interrupts this process after a step, as Ctrl-C would."""

    def __init__(self, step: int) -> None:
        self._step = step

    def step(self, step: int, steps: int, metrics: object) -> None:
        if step == self._step:
            os.kill(os.getpid(), signal.SIGINT)


def measured(output: Path) -> list[dict[str, float]]:
    """All lines of the metrics that do not depend on the clock."""
    return [
        {k: v for k, v in row.items() if k.startswith("loss/") or k in MEASURED}
        for row in table(output / "metrics.csv")
    ]


def weights(output: Path, *folders: str) -> dict[str, torch.Tensor]:
    """The result's weights, by file and name."""
    files = [file for folder in folders for file in sorted((output / folder).glob("*.safetensors"))]
    assert len(files) == len(folders)
    return {
        f"{file.parent}/{name}".removeprefix(str(output)): t for file in files for name, t in load_file(file).items()
    }


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def apart(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], since: dict[str, torch.Tensor]) -> float:
    """How far two results differ, as a part of how far training moved. Adam divides rounding by what may be small."""
    begun = {name.rsplit("/", 1)[1]: tensor for name, tensor in since.items()}
    moved = torch.cat([(tensor - begun[name.rsplit("/", 1)[1]]).flatten() for name, tensor in theirs.items()])
    differing = torch.cat([(ours[name] - tensor).flatten() for name, tensor in theirs.items()])
    assert float(moved.norm()) > 0
    return float(differing.norm() / moved.norm())


def moved(run: Run, tmp_path: Path, name: str) -> Run:
    return replace(run, output=str(tmp_path / name))


def written(run: Run, tmp_path: Path) -> str:
    """The run's file."""
    file = tmp_path / f"{Path(run.output).name}.yaml"
    file.write_text(text(run))
    return str(file)


@pytest.mark.parametrize("settings", [FULL, LORA], ids=["full", "lora"])
def test_interrupted_and_continued_is_uninterrupted(settings, run_of, tmp_path):
    run = run_of(**settings)
    folders = ("lora", "lora-ema") if run.lora else ("model/transformer", "model-ema/transformer")
    whole, parts = moved(run, tmp_path, "whole"), moved(run, tmp_path, "parts")
    assert train(whole).finished
    for stop in (1, 5):
        outcome = train(parts, StopAfter(stop))
        assert (outcome.finished, outcome.step, outcome.result) == (False, stop, None)
    said: list[str] = []
    shown = StopAfter(0)
    shown.say = said.append
    assert train(parts, shown).finished and said == ["continuing after step 5 of 12"]
    assert measured(tmp_path / "parts") == measured(tmp_path / "whole") and len(measured(tmp_path / "whole")) == 13
    assert same(weights(tmp_path / "parts", *folders), weights(tmp_path / "whole", *folders))


def test_killed_and_continued_on_two_processes_is_uninterrupted_and_two_are_one(run_of, tmp_path):
    """The processes are really killed, after a checkpoint and two steps more; those two are done again."""
    run = run_of(**{**FULL, "epochs": 2, "checkpoints": {"every": 3}})
    one, two, parts = (moved(run, tmp_path, name) for name in ("one", "two", "parts"))
    train(one)
    assert launch(2, workers.whole, (written(two, tmp_path),)) == 0
    assert launch(2, workers.killed, (written(parts, tmp_path), 5)) != 0
    assert [path.name for path in (tmp_path / "parts" / "checkpoints").iterdir()] == ["step-00000003"]
    assert launch(2, workers.whole, (written(parts, tmp_path),)) == 0
    folders = ("model/transformer", "model-ema/transformer")
    assert measured(tmp_path / "parts") == measured(tmp_path / "two") and len(measured(tmp_path / "two")) == 7
    assert same(weights(tmp_path / "parts", *folders), weights(tmp_path / "two", *folders))
    ours, theirs = (weights(tmp_path / name, *folders) for name in ("two", "one"))
    assert apart(ours, theirs, since=weights(Path(run.model), "transformer")) < 1e-3
    for a, b in zip(measured(tmp_path / "two"), measured(tmp_path / "one"), strict=True):
        assert a == pytest.approx(b, rel=1e-5)


def test_processes_that_hold_all_weights_each_are_one(run_of, tmp_path):
    """From a checkpoint that one process wrote alone."""
    run = run_of(**{**FULL, "epochs": 2, "parallel": "replicate"})
    one, two = moved(run, tmp_path, "one"), moved(run, tmp_path, "two")
    train(one)
    assert not train(two, StopAfter(1)).finished
    assert launch(2, workers.whole, (written(two, tmp_path),)) == 0
    folders = ("model/transformer", "model-ema/transformer")
    ours, theirs = (weights(tmp_path / name, *folders) for name in ("two", "one"))
    assert apart(ours, theirs, since=weights(Path(run.model), "transformer")) < 1e-3
    for a, b in zip(measured(tmp_path / "two"), measured(tmp_path / "one"), strict=True):
        assert a == pytest.approx(b, rel=1e-5)


def test_another_number_of_processes_may_continue_and_all_pick_the_same_expert(run_of, tmp_path):
    """Of two experts each part of a step trains one; processes that disagreed would wait for each other for good.

    They make previews together, too, as each holds but a part of the weights.
    """
    still = {"height": 32, "width": 32, "num_frames": 1, "num_inference_steps": 2, "max_sequence_length": 32}
    previews = {"prompts": ["a red fox"], "every": 6, "parameters": still}
    settings = {"accumulate": 2, "optimiser": {"lr": 1e-3}, "sft": {"sampling": "uniform", "shift": 5.0}}
    run = run_of("a14b", steps=6, previews=previews, **settings)
    one, mixed = moved(run, tmp_path, "one"), moved(run, tmp_path, "mixed")
    train(one)
    assert not train(mixed, StopAfter(2)).finished
    assert launch(2, workers.whole, (written(mixed, tmp_path),)) == 0
    for role in ("transformer", "transformer_2"):
        ours, theirs = (weights(tmp_path / name, f"model/{role}") for name in ("mixed", "one"))
        assert apart(ours, theirs, since=weights(Path(run.model), role)) < 1e-3
    before, alone, together = (
        media.read_image(tmp_path / name / "previews" / f"step-0000000{step}-0.png").astype(int)
        for name, step in (("one", 0), ("one", 6), ("mixed", 6))
    )
    assert abs(together - alone).max() <= 1 < abs(before - alone).max()


def test_a_run_continued_with_more_steps_goes_on_and_a_finished_one_is_left(run_of, tmp_path):
    run = run_of(steps=3, optimiser={"lr": 1e-3})
    assert train(run).step == 3
    before = weights(Path(run.output), "model/transformer")
    assert train(run).finished and same(weights(Path(run.output), "model/transformer"), before)
    longer = train(replace(run, steps=5))
    assert (longer.finished, longer.step) == (True, 5)
    assert [row["step"] for row in table(Path(run.output) / "metrics.csv")] == [1, 2, 3, 4, 5]
    assert train(moved(replace(run, steps=5), tmp_path, "whole")).finished
    assert measured(Path(run.output)) == measured(tmp_path / "whole")


@pytest.mark.parametrize(
    "change",
    [{"seed": 1}, {"batch_size": 2}, {"ema": 0.5}, {"precision": "bfloat16"}, {"optimiser": Optimiser(lr=0.5)}],
)
def test_a_folder_with_another_run_is_refused_before_anything_is_written(change, run_of):
    run = run_of(steps=1)
    train(run)
    files = {path: path.stat().st_mtime_ns for path in Path(run.output).rglob("*")}
    name = "optimiser.lr" if "optimiser" in change else next(iter(change))
    told = rf"holds a run with another {name}: .*; it was .*: set it back .* or choose another output"
    with pytest.raises(StateError, match=told):
        train(replace(run, **change))
    assert {path: path.stat().st_mtime_ns for path in Path(run.output).rglob("*")} == files


def test_a_warm_run_loads_no_encoder_and_starts_no_engine(run_of, monkeypatch):
    train(run_of(steps=1))
    monkeypatch.setattr(encoders, "load_encoder", lambda *given: pytest.fail("an encoder was loaded"))
    monkeypatch.setattr(instance.Instance, "__init__", lambda *given, **more: pytest.fail("an engine was started"))
    run = replace(run_of(steps=2, train_only=True), output=str(run_of(steps=1).output) + "-warm")
    assert train(run).finished
    first, second = table(Path(run.output) / "metrics.csv")
    assert first["cache_misses"] == 0 and first["encode_seconds"] >= 0 and "cache_misses" not in second


def test_a_cold_run_encodes_all_there_is_and_says_so(run_of, tmp_path):
    run = run_of(steps=1, data={"cache": str(tmp_path / "cold")})
    train(run)
    (row,) = table(Path(run.output) / "metrics.csv")
    assert row["cache_misses"] >= 11 and row["encode_seconds"] > 0
    assert {"loss", "grad_norm", "lr", "samples_per_second", "tokens_per_second"} <= set(row)


@pytest.mark.parametrize("kind", ["t2v", "a14b", "ti2v"])
def test_the_result_is_served_and_diffusers_generates_the_same_with_it(kind, run_of, tmp_path):
    settings = {"data": {"first_frame": True, "geometry": ["32x32x5"]}} if kind == "ti2v" else {}
    run = run_of(kind, steps=3, optimiser={"lr": 1e-3}, **settings)
    result = train(run).result
    card = load_card(result / "card.json")
    parent = catalog.find(run.model)
    assert card.recipe.kind == "sft" and card.recipe.parents == (f"{parent.name}@{parent.digest}",)
    model = loopwright.load(result, device="cpu", store=Store(0))
    wanted = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 2, "max_sequence_length": 32}
    made = model.generate("a red fox", task="text_to_video", seed=3, output="latents", **wanted).latents
    before = loopwright.load(run.model, device="cpu", store=Store(0))
    assert not torch.equal(
        made, before.generate("a red fox", task="text_to_video", seed=3, output="latents", **wanted).latents
    )
    theirs = tiny.WanPipeline.from_pretrained(result, torch_dtype=torch.float32)
    theirs.set_progress_bar_config(disable=True)
    generator = torch.Generator("cpu").manual_seed(3)
    expected = theirs("a red fox", negative_prompt="", generator=generator, output_type="latent", **wanted).frames
    assert torch.equal(made, expected)


def test_a_result_may_be_stored_in_bfloat16(run_of, tmp_path):
    run = run_of(steps=1, optimiser={"lr": 1e-3})
    train(run)
    train(replace(run, stored="bfloat16"))
    ours = weights(Path(run.output), "model/transformer")
    train(moved(run, tmp_path, "full"))
    theirs = weights(tmp_path / "full", "model/transformer")
    assert all(
        tensor.dtype == torch.bfloat16 and torch.equal(tensor, theirs[n].bfloat16()) for n, tensor in ours.items()
    )


def test_an_image_to_video_model_is_trained_on_first_frames(run_of):
    run = run_of("i2v", steps=3, optimiser={"lr": 1e-3}, data={"first_frame": True})
    result = train(run).result
    before = weights(Path(run.model), "transformer")
    after = weights(result, "transformer")
    moved = [name for name in after if not torch.equal(after[name], before[name])]
    assert any("image_embedder" in name for name in moved) and any("add_k_proj" in name for name in moved)


def test_adapters_that_were_trained_are_loaded_by_diffusers(run_of):
    run = run_of(steps=3, lora={"rank": 2, "alpha": 4}, optimiser={"lr": 1e-2})
    result = train(run).result
    pipeline = tiny.WanPipeline.from_pretrained(run.model, torch_dtype=torch.float32)
    pipeline.load_lora_weights(str(result), weight_name="transformer.safetensors")
    (name,) = pipeline.get_list_adapters()["transformer"]
    layer = pipeline.transformer.blocks[0].attn1.to_q
    assert layer.scaling[name] == 2 and float(layer.lora_B[name].weight.detach().abs().max()) > 1e-3


def test_a_loss_that_is_not_finite_ends_the_run_before_anything_changes(run_of, monkeypatch):
    real = session.METHODS["sft"]

    class Spoilt:
        def __init__(self, *given):
            self._method = real(*given)

        def losses(self, networks, batch, moment):
            losses = self._method.losses(networks, batch, moment)
            return replace(losses, rows=losses.rows * (float("nan") if moment.step == 2 else 1))

    monkeypatch.setitem(session.METHODS, "sft", Spoilt)
    run = run_of(steps=4, checkpoints={"every": 2})
    with pytest.raises(ModelError, match="not finite at step 3"):
        train(run)
    assert [row["step"] for row in table(Path(run.output) / "metrics.csv")] == [1, 2]


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("t2v", {"train": ["transformer_2"]}, "train names no network that generates: 'transformer_2'"),
        ("t2v", {"attention": "fa3"}, "attention not available"),
        ("t2v", {"device": "abacus"}, "no such device: 'abacus'"),
        ("t2v", {"lora": {"targets": ["to_z"]}}, "to_z"),
        ("t2v", {"data": {"encoder_checkpoint": "./nowhere"}}, "no such folder"),
        ("t2v", {"data": {"geometry": ["32x32x6"]}}, "num_frames must be a multiple of 4 plus 1"),
        ("t2v", {"data": {"dataset": "nowhere.jsonl"}}, "no such data set"),
        ("t2v", {"data": {"first_frame": True}}, "data.first_frame: "),
        ("i2v", {}, "data.first_frame: i2v-euler needs an image"),
        ("t2v", {"sinks": ["trackio"]}, "sinks: trackio cannot be had: 'trackio'; pip install 'loopwright[trackio]'"),
        ("t2v", {"previews": {"prompts": ["a"], "parameters": {"height": 33}}}, "height must be a multiple of 16"),
        ("t2v", {"previews": {"prompts": ["a"], "image": "x.png"}}, "previews.image: t2v-euler takes no image"),
        (
            "i2v",
            {"previews": {"prompts": ["a"]}, "data": {"first_frame": True}},
            "previews.image: i2v-euler needs an image; give its path",
        ),
        (
            "i2v",
            {"previews": {"prompts": ["a"], "image": "nowhere.png"}, "data": {"first_frame": True}},
            "nowhere.png",
        ),
        ("t2v", {"previews": {"prompts": ["a"], "parameters": {"hieght": 32}}}, "unknown parameter: 'hieght'"),
    ],
)
def test_what_cannot_be_trained_is_told_before_weights_are_read_or_files_written(
    kind, settings, message, run_of, monkeypatch
):
    monkeypatch.setattr("loopwright.weights.load._module", lambda *given: pytest.fail("weights were read"))
    run = run_of(kind, steps=1, **settings)
    with pytest.raises(LoopwrightError) as error:
        train(run)
    assert message in str(error.value) and not Path(run.output).exists()


def test_encoders_of_another_kind_than_the_models_are_refused(run_of, checkpoint):
    with pytest.raises(LoopwrightError, match=r"data\.encoder_checkpoint: its channels is not the model's 16: 48"):
        train(run_of("t2v", steps=1, data={"encoder_checkpoint": str(checkpoint("ti2v"))}))
