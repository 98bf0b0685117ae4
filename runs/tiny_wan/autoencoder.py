"""The autoencoder's second run: clips, from where single frames ended.

loopwright train autoencoder.py
"""

from dataclasses import replace
from runpy import run_path

from loopwright.training.drawn import Drawn
from loopwright.training.methods.autoencoder import Settings as Autoencoder
from loopwright.training.run import Optimiser, Schedule

run = replace(
    run_path("autoencoder_frames.py")["run"],
    model="state/clips_start",
    output="state/clips",
    drawn=Drawn("feeds.py", "clips", {"sprites": "sprites.npz"}),
    # what is wanted is square error, and clips that reconstruct badly count most
    autoencoder=Autoencoder(focus_weight=6.0, absolute_weight=0.1, gradient_weight=0.1),
    steps=6500,
    batch_size=48,
    optimiser=Optimiser(lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0),
    schedule=Schedule("cosine", warmup=100, final=0.01),
)
