"""Keeps libraries from talking into a command's output: their progress bars, warnings and advice.

    with quiet():
        model.generate(...)

Nothing is silenced where LOOPWRIGHT_DEBUG is set. Deliberately absent: swallowing stderr, which would hide real errors.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """Import the libraries with their voices off; Python's own warnings return afterwards."""
    if os.environ.get("LOOPWRIGHT_DEBUG"):
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _hush()
        yield


def _hush() -> None:
    from diffusers.utils import logging as diffusers_logging
    from huggingface_hub.utils import disable_progress_bars
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging as transformers_logging

    disable_progress_bars()
    for logging in (hub_logging, transformers_logging, diffusers_logging):
        logging.set_verbosity_error()
    for logging in (transformers_logging, diffusers_logging):
        logging.disable_progress_bar()
