"""The transformer: clips from words, single frames, and clips from their first frame and words, all in one.

loopwright train text_to_video.py
"""

from loopwright.training.drawn import Drawn
from loopwright.training.methods.sft import Settings as Sft
from loopwright.training.run import Checkpoints, Optimiser, Run, Schedule

run = Run(
    model="state/start",
    output="state/text_to_video",
    drawn=Drawn(
        "feeds.py",
        "latents",
        {"sprites": "sprites.npz", "autoencoder": "state/start/vae", "cache": "state/cache", "count": 240_000},
    ),
    sft=Sft(sampling="logit_normal", logit_std=1.4, shift=3.0, caption_dropout=0.1, draws="batch"),
    steps=17_500,
    batch_size=512,  # on one GPU: half as many a step take as long, for its launches are what that waits for
    optimiser=Optimiser(lr=1e-3, betas=(0.9, 0.99), weight_decay=0.01),
    schedule=Schedule("cosine", warmup=200, final=0.02),
    ema=0.998,
    compile=True,
    parallel="replicate",
    log_every=20,
    stored="bfloat16",
    checkpoints=Checkpoints(every=100_000),
    sinks=(),
)
