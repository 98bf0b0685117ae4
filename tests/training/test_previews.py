"""Previews are what the engine serves with the weights as they are, and cost training nothing but time."""

from pathlib import Path

import numpy as np
import pytest

import loopwright
from loopwright import media
from loopwright.api import read_record
from loopwright.engine.instance import Store
from loopwright.training.session import train

SMALL = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 2, "max_sequence_length": 32}
PREVIEWS = {"prompts": ["a red fox", "a blue bird"], "every": 2, "seed": 7}


def test_the_first_and_the_last_preview_are_what_the_parent_and_the_result_generate(run_of, tmp_path):
    still = {**SMALL, "num_frames": 1}  # a PNG keeps every pixel
    run = run_of(steps=3, optimiser={"lr": 1e-2}, previews={**PREVIEWS, "parameters": still})
    result = train(run).result
    files = sorted(path.name for path in (Path(run.output) / "previews").iterdir())
    assert files == [f"step-{step:08}-{index}.png" for step in (0, 2, 3) for index in (0, 1)]
    for folder, step in ((run.model, 0), (result, 3)):
        model = loopwright.load(folder, device="cpu", store=Store(0))
        for parameter in model.instance.part("transformer").parameters():
            parameter.data = parameter.data.clone()  # aligned as a network in training is
        for index, prompt in enumerate(PREVIEWS["prompts"]):
            made = model.generate(prompt, task="text_to_video", seed=7, **still).image
            shown = media.read_image(Path(run.output) / "previews" / f"step-{step:08}-{index}.png")
            np.testing.assert_array_equal(shown, made)
    record = read_record(Path(run.output) / "previews" / "step-00000002-1.png")
    assert record["model"].endswith("after step 2") and record["request"]["prompt"] == "a blue bird"


def test_previews_change_nothing_in_training(run_of, tmp_path):
    """That two processes make them together is shown in `test_session`."""
    plain = run_of(steps=2, optimiser={"lr": 1e-3}, output=str(tmp_path / "plain"))
    shown = run_of(steps=2, optimiser={"lr": 1e-3}, previews={**PREVIEWS, "parameters": SMALL})
    a, b = (train(run).result / "transformer/diffusion_pytorch_model.safetensors" for run in (plain, shown))
    assert a.read_bytes() == b.read_bytes()
    film = media.read_video(Path(shown.output) / "previews" / "step-00000002-0.mp4")[0]
    assert film.shape == (5, 32, 32, 3)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_preview_with_adapters_is_what_the_parent_generates_with_their_file(precision, run_of):
    """The weights below adapters are as served, and adapters are computed with in the layers' precision."""
    still = {**SMALL, "num_frames": 1}
    settings = {"lora": {"rank": 2, "alpha": 4}, "optimiser": {"lr": 3e-2}, "precision": precision}
    run = run_of(steps=3, previews={**PREVIEWS, "parameters": still}, **settings)
    adapter = train(run).result / "transformer.safetensors"
    model = loopwright.load(run.model, device="cpu", dtype=precision, store=Store(0), lora=[adapter])
    made = model.generate("a red fox", task="text_to_video", seed=7, **still).image
    first, last = (media.read_image(Path(run.output) / "previews" / f"step-0000000{step}-0.png") for step in (0, 3))
    assert np.abs(last.astype(int) - made).max() <= (1 if precision == "float32" else 0)
    assert np.abs(first.astype(int) - made).max() > 5


def test_a_model_that_must_have_an_image_shows_what_it_makes_of_one(run_of, plotless, tmp_path):
    media.write(tmp_path / "first.png", np.full((1, 48, 32, 3), (200, 40, 90), np.uint8), fps=1, metadata={})
    shown = {"prompts": ["a red fox"], "seed": 7, "image": str(tmp_path / "first.png"), "parameters": SMALL}
    run = run_of("i2v", steps=1, optimiser={"lr": 1e-3}, data={"first_frame": True}, previews=shown)
    result = train(run).result
    model = loopwright.load(result, device="cpu", store=Store(0))
    made = model.generate("a red fox", image=tmp_path / "first.png", seed=7, **SMALL)
    expected = media.read_video(made.save(tmp_path / "made.mp4"))[0]
    film = Path(run.output) / "previews" / "step-00000001-0.mp4"
    np.testing.assert_allclose(media.read_video(film)[0].astype(int), expected, atol=2)
    assert "first.png" in read_record(film)["request"]["image"]
