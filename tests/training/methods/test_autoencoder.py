"""Reconstruction: the loss is the pixels', exact to recompute; a run of it lowers the error and leaves a model."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan

import loopwright
from loopwright import catalog
from loopwright.errors import RequestError
from loopwright.training import session
from loopwright.training.drawn import Drawn
from loopwright.training.methods import Batch, Material, Moment
from loopwright.training.methods.autoencoder import ROLE, Autoencoder, Settings
from loopwright.training.plan import make
from loopwright.training.run import Data, Evaluation, Lora, Optimiser, Run
from loopwright.training.sinks import table

FILE = '''
"""A stripe on a colour."""
import torch

class Stripes:
    blank = None

    def batch(self, step, rows, generator):
        shade = torch.rand(rows, 1, 1, 1, 1, generator=generator) / 10
        colour = torch.tensor([0.9, 0.6, 0.3]).view(1, 3, 1, 1, 1) + shade
        video = colour.expand(-1, -1, 5, 32, 32).clone()
        video[..., 8:16] -= 0.2
        focus = torch.zeros(rows, 1, 5, 32, 32)
        focus[..., 8:16] = 1
        return {"video": video, "focus": focus}

    def held_out(self):
        return [self.batch(0, 4, torch.Generator().manual_seed(7))]

def stripes(device):
    return Stripes()
'''


@pytest.fixture
def run(checkpoint, tmp_path) -> Run:
    (tmp_path / "stripes.py").write_text(FILE)
    return Run(
        str(checkpoint("ti2v")), str(tmp_path / "out"), drawn=Drawn(str(tmp_path / "stripes.py"), "stripes"), steps=20,
        batch_size=4, method="autoencoder", device="cpu", sinks=(), optimiser=Optimiser(lr=2e-2, betas=(0.9, 0.99)),
        evaluation=Evaluation(every=20, draws=1), log_every=5,
    )  # fmt: skip


def method(checkpoint, **settings: float) -> tuple[Autoencoder, dict[str, AutoencoderKLWan], Batch]:
    folder = checkpoint("ti2v")
    card = catalog.find(str(folder))
    vae = AutoencoderKLWan.from_pretrained(folder / "vae")
    video = torch.rand(2, 3, 5, 32, 32, generator=torch.Generator().manual_seed(1)) * 2 - 1
    focus = torch.zeros(2, 1, 5, 32, 32)
    focus[0, ..., 4:9, 4:9] = 1
    batch = Batch({"video": video, "focus": focus}, ("a", "b"), (0, 1), 2)
    material = Material(card, catalog.velocity(card), (ROLE,), torch.float32, "sdpa", None)
    return Autoencoder(Settings(**settings), material), {ROLE: vae}, batch


def test_held_out_figures_are_those_of_the_served_passes(checkpoint):
    ours, networks, batch = method(checkpoint)
    measured = ours.held_out(networks, batch, 0, 1)
    vae, video = networks[ROLE], batch.tensors["video"]
    with torch.no_grad():
        square = (vae.decode(vae.encode(video).latent_dist.mode()).sample - video).square()
    torch.testing.assert_close(measured.logs["psnr"], 10 * torch.log10(4 / square.flatten(1).mean(1)))
    inside = square[0, ..., 4:9, 4:9].mean()
    torch.testing.assert_close(measured.logs["psnr_focus"][0], 10 * torch.log10(4 / inside))
    assert measured.logs["psnr_focus"][1].isnan()


def test_the_loss_is_the_weighted_error_and_the_same_at_the_same_moment(checkpoint):
    ours, networks, batch = method(checkpoint, gradient_weight=0.0, kl_weight=0.0, focus_weight=3.0)
    vae, video = networks[ROLE], batch.tensors["video"]
    with torch.no_grad():
        vae.quant_conv.weight[48:], vae.quant_conv.bias[48:] = 0, -40.0  # no noise to speak of
        error = vae.decode(vae.encode(video).latent_dist.mode()).sample - video
    first, again = (ours.losses(networks, batch, Moment(0, 3, 0)) for _ in range(2))
    assert torch.equal(first.rows, again.rows)
    pixels = error.abs() / 2 + 4 * error.square()
    beside = torch.ones(32, 32)
    beside[3:10, 3:10] = 3  # and the pixels around the focus
    wanted = torch.stack([(pixels[0] * beside).mean(), pixels[1].mean()])
    torch.testing.assert_close(first.rows, wanted, rtol=0.02, atol=0)  # the loss does not cut what leaves -1..1


def test_noise_is_of_the_moment(checkpoint):
    ours, networks, batch = method(checkpoint)
    rows = [ours.losses(networks, batch, Moment(seed, step, 0)).rows for seed, step in ((0, 0), (0, 1), (1, 0))]
    assert not torch.equal(rows[0], rows[1]) and not torch.equal(rows[0], rows[2])


def test_a_run_lowers_the_error_and_its_model_generates(run):
    outcome = session.train(run)
    rows = table(Path(run.output) / "metrics.csv")
    assert rows[-1]["square_error"] < 0.7 * next(row["square_error"] for row in rows if "square_error" in row)
    assert rows[-1]["held_out/psnr"] > 5 and "held_out/psnr_focus" in rows[-1]
    model = loopwright.load(outcome.result, device="cpu")
    assert model.generate("x", height=32, width=32, num_frames=5, num_inference_steps=1).video.shape == (5, 32, 32, 3)


@pytest.mark.parametrize(
    "change",
    [{"lora": Lora()}, {"gradient_checkpointing": True}, {"train": ("transformer",)},
     {"drawn": None, "data": Data("rows.jsonl", "m", "cache", held_out=0.1)}],
)  # fmt: skip
def test_what_the_method_does_not_take_is_refused(run, change):
    with pytest.raises(RequestError, match="autoencoder takes no"):
        replace(run, **change)


def test_several_processes_hold_all_of_it_each_or_are_refused_before_they_start(run):
    assert make(replace(run, parallel="replicate"), 2).roles == (ROLE,)
    with pytest.raises(RequestError, match="an autoencoder is not sharded: '2 processes'; set parallel to replicate"):
        make(run, 2)
