"""What processes of their own do in tests of training. Run files and checkpoints are all they share."""

import os
import signal
from pathlib import Path

from loopwright.training.run import read
from loopwright.training.session import Silent, train


class Killed(Silent):
    """Ends this process without warning after a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def step(self, step: int, steps: int, metrics: object) -> None:
        if step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def whole(file: str) -> int:
    """Train to the end."""
    _quiet()
    return 0 if train(read(Path(file))).finished else 1


def killed(file: str, step: int) -> int:
    """Train, and be killed after that step: the first process alone, while the others are in the next."""
    _quiet()
    train(read(Path(file)), Killed(step))
    return 1


def interrupted(file: str) -> int:
    """Train for as long as it takes to be interrupted."""
    _quiet()
    print("begun", flush=True)
    outcome = train(read(Path(file)))
    return 130 if not outcome.finished else 0


def _quiet() -> None:
    import torch
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    torch.set_num_threads(1)
    for logging in (diffusers_logging, transformers_logging):
        logging.disable_progress_bar()
        logging.set_verbosity_error()
