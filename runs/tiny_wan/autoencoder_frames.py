"""The autoencoder's first run: single frames, which are cheap and teach the drawings.

loopwright train autoencoder_frames.py
"""

from loopwright.training.drawn import Drawn
from loopwright.training.run import Checkpoints, Evaluation, Optimiser, Run, Schedule

run = Run(
    model="state/fresh",
    output="state/frames",
    method="autoencoder",
    drawn=Drawn("feeds.py", "frames", {"sprites": "sprites.npz"}),
    steps=2000,
    batch_size=384,
    optimiser=Optimiser(lr=1.5e-3, betas=(0.9, 0.99), weight_decay=0.0),
    schedule=Schedule("cosine", warmup=100, final=0.15),
    ema=0.99,
    compile=True,
    parallel="replicate",
    log_every=20,
    checkpoints=Checkpoints(every=100_000),
    evaluation=Evaluation(every=1000, draws=1),
    sinks=(),
)
