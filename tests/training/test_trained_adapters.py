"""Adapters that a run has trained: what others make of their file, in every layout."""

from dataclasses import replace

import torch
from safetensors import safe_open

import loopwright
import tiny
from loopwright.engine.instance import Store
from loopwright.training.session import train
from loopwright.weights.lora.keys import LAYOUTS, PREFIX
from support import media_for

EVERY = ["to_[qkv]", r"to_out\.0", r"ffn\.net\.0\.proj", r"ffn\.net\.2"]  # what diffusers wants of kohya's layout


def served(folder: str, *files: str) -> torch.Tensor:
    model = loopwright.load(folder, device="cpu", lora=files, store=Store(0))
    return model.generate("a fox", output="latents", **media_for("t2v")).latents


def diffused(folder: str, file: str) -> torch.Tensor:
    """The latents of diffusers' own pipeline with a file that it loaded itself."""
    pipeline = tiny.reference(folder, "t2v")
    pipeline.load_lora_weights(file)
    given = {name: value for name, value in media_for("t2v").items() if name not in ("task", "seed")}
    generator = torch.Generator("cpu").manual_seed(media_for("t2v")["seed"])
    return pipeline(prompt="a fox", generator=generator, output_type="latent", **given).frames


def test_trained_adapters_give_in_diffusers_what_they_give_here_in_each_layout(run_of, plotless):
    """The later two are written by continuing a run that has come to its end."""
    run = run_of(steps=2, lora={"rank": 2, "alpha": 4, "targets": EVERY}, optimiser={"lr": 3e-2})
    base = served(run.model)
    for layout in LAYOUTS:
        file = str(train(replace(run, lora=replace(run.lora, layout=layout))).result / "transformer.safetensors")
        with safe_open(file, "pt") as opened:
            assert all(key.startswith(PREFIX[layout]) for key in opened.keys())  # noqa: SIM118
        ours = served(run.model, file)
        assert torch.equal(ours, diffused(run.model, file)), layout
        assert float((ours - base).norm() / base.norm()) > 1e-2
