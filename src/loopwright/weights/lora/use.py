"""Which adapters a model is to run: what users write, read and checked before the model's weights are.

    uses(["style.safetensors:0.8", "transformer_2=motion.safetensors"], experts=("transformer", "transformer_2"))

Each is a path; `:0.8` after it scales what it adds (1 if left out), and `component=` before it says whose it is, which
a model with one expert need not be told.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ...errors import RequestError
from .adapter import Adapter, read


@dataclass(frozen=True, slots=True)
class Use:
    """An adapter of a component, times a scale. With scale 0 the component runs without it."""

    component: str
    adapter: Adapter
    scale: float

    def record(self) -> dict[str, str | float]:
        """What tells it from others, as JSON values."""
        return {
            "component": self.component,
            "file": self.adapter.file,
            "digest": self.adapter.digest,
            "scale": self.scale,
        }


def uses(given: Iterable[str | Path], experts: tuple[str, ...]) -> tuple[Use, ...]:
    """Read the adapters. Raises RequestError for a component or a scale that cannot be, WeightsError for a bad file."""
    return tuple(_use(str(one), experts) for one in given)


def _use(text: str, experts: tuple[str, ...]) -> Use:
    component, path, scale = _taken_apart(text)
    if component is None and len(experts) > 1:
        raise RequestError(
            "the model has several experts, so say whose adapter this is",
            value=text,
            choices=[f"{name}={text}" for name in experts],
        )
    if component not in (None, *experts):
        remedy = "name one of these, or write ./ before a path with ="
        raise RequestError("adapters are for components that generate", value=component, choices=experts, remedy=remedy)
    return Use(component or experts[0], read(path), scale)


def _taken_apart(text: str) -> tuple[str | None, str, float]:
    """Component, path and scale. What follows the last colon is part of the path if it is no number."""
    named = re.match(r"(\w+)=", text)
    path = text[named.end() :] if named else text
    before, _, after = path.rpartition(":")
    try:
        scale = float(after) if before else None
    except ValueError:
        scale = None
    if scale is not None and not math.isfinite(scale):
        raise RequestError("the scale of an adapter must be a finite number", value=text)
    return (named[1] if named else None), (path if scale is None else before), (1.0 if scale is None else scale)
