"""What a model takes, as JSON Schema: names, types, defaults and limits, for clients that build their forms from it.

parameters(model, limits)["text_to_video"]["properties"]["height"]   # {"type": "integer", "multipleOf": 16, ...}
"""

import types
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Union, get_args, get_origin, get_type_hints

from ..api.model import Model, sampler_of
from ..backends.device import probe
from ..backends.registry import ATTENTIONS, SETS, require
from ..card import Card, Value, experts, whole
from ..errors import BackendError
from ..loops.denoise import SOLVERS
from ..program import MAX_SEED
from ..request import ATTENTION, KERNELS, MODES, Request
from .models import adapters
from .settings import Limits

_NAMES = {str: "string", int: "integer", float: "number", type(None): "null"}
_APART = ("model", "task", "image", "video", "output")
_NOISE = ("noise_level", "noise_start", "noise_steps")


def described(model: Model, state: str, limits: Limits) -> dict[str, object]:
    """A model as OpenAI's clients list it, and what it takes."""
    card, versions = model.card, model.instance.loaded
    return {
        "id": card.name,
        "object": "model",
        "state": state,
        "created": 0,
        "owned_by": card.name.split("/")[0] if "/" in card.name else "local",
        "tasks": {task: {"inputs": list(program.inputs)} for task, program in card.programs.items()},
        "parameters": parameters(model, limits),
        "card": card.digest,
        "weights": {name: versions[name] for name in experts(card) if name in versions},
        "dtypes": {name: c.dtype for name, c in card.components.items() if c.dtype},
        "device": model.instance.binding.device,
        "sampler": sampler_of(card),
        "revision": model.revision,
        "lora": adapters(model),
    }


def parameters(model: Model, limits: Limits) -> dict[str, object]:
    """A schema a task, of what means something to it. `x-step` is the distance of values that can be made, from
    `minimum` on.
    """
    card, bounds = model.card, _bounds(model.card, limits) | _kernels(model)
    return {task: _schema(_names(card, task), card.defaults[task], bounds) for task in card.programs}


def _names(card: Card, task: str) -> list[str]:
    """Without those of a second expert, of a source or of drawn noise where there is none."""
    without = {*_APART}
    if card.settings.get("boundary") is None:
        without.add("guidance_scale_2")
    if "video" not in card.programs[task].inputs:
        without.add("strength")
    if not SOLVERS[sampler_of(card)].stepper:
        without.update(_NOISE)
    return [field.name for field in fields(Request) if field.name not in without]


def _schema(
    names: Sequence[str], defaults: Mapping[str, Value], bounds: Mapping[str, Mapping[str, object]]
) -> dict[str, object]:
    hints = get_type_hints(Request)
    properties = {name: _property(name, hints[name], defaults, bounds.get(name, {})) for name in names}
    return {"type": "object", "properties": properties, "required": ["prompt"], "additionalProperties": False}


def _property(
    name: str, hint: object, defaults: Mapping[str, Value], bounds: Mapping[str, object]
) -> dict[str, object]:
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    named = [_NAMES[kind] for kind in kinds]  # type: ignore[index]
    found: dict[str, object] = {"type": named[0] if len(named) == 1 else named}
    if name in defaults:
        found["default"] = defaults[name]
    return {**found, **bounds}


def _kernels(model: Model) -> dict[str, dict[str, object]]:
    """What runs on the model's device in its precision."""
    binding = model.instance.binding

    def runs(**choice: str) -> bool:
        try:
            require(probe(binding.device), binding.precision, **choice)
        except BackendError:
            return False
        return True

    return {
        "attention": {"enum": [name for name in ATTENTIONS if runs(attention=name)], "default": ATTENTION},
        "kernels": {"enum": [name for name in SETS if runs(kernels=name)], "default": KERNELS},
    }


def _bounds(card: Card, limits: Limits) -> dict[str, dict[str, object]]:
    size = {"minimum": whole(card.settings, "size_multiple"), "multipleOf": whole(card.settings, "size_multiple")}
    stride = whole(card.settings, "frame_stride")
    scale = {"minimum": 0, "maximum": limits.scale}
    steps = {"enum": list(card.recipe.steps)} if card.recipe.steps else {"minimum": 1, "maximum": limits.steps}
    return {
        "prompt": {"maxLength": limits.prompt},
        "negative_prompt": {"maxLength": limits.prompt},
        "height": dict(size),
        "width": dict(size),
        "num_frames": {"minimum": 1, "x-step": stride, "description": f"a multiple of {stride} plus 1"},
        "num_inference_steps": dict(steps),
        "guidance_scale": dict(scale),
        "guidance_scale_2": dict(scale),
        "flow_shift": {"exclusiveMinimum": 0, "maximum": limits.scale},
        "noise_level": dict(scale),
        "strength": {"exclusiveMinimum": 0, "maximum": 1},
        "max_sequence_length": {"minimum": 1, "maximum": limits.sequence},
        "fps": {"minimum": 1, "maximum": limits.fps},
        "seed": {"minimum": 0, "maximum": MAX_SEED, "description": "drawn if left out"},
        "mode": {"enum": list(MODES), "default": "fixed"},
        "rows": {"minimum": 1, "maximum": limits.rows, "description": "of fixed mode; measured if left out"},
    }
