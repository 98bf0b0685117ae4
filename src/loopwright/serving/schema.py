"""What a model takes, as JSON Schema: names, types, defaults and limits, for clients that build their forms from it.

parameters(model, limits)["text_to_video"]["properties"]["height"]   # {"type": "integer", "multipleOf": 16, ...}
"""

import types
from dataclasses import fields
from typing import Union, get_args, get_origin, get_type_hints

from ..api.model import Model, sampler_of
from ..card import Card, experts, whole
from ..program import MAX_SEED
from ..request import MODES, Request
from .settings import Limits

_NAMES = {str: "string", int: "integer", float: "number", type(None): "null"}
_APART = ("model", "task", "image", "video", "output")


def described(model: Model, limits: Limits) -> dict[str, object]:
    """A model as OpenAI's clients list it, and what it takes."""
    card = model.card
    return {
        "id": card.name,
        "object": "model",
        "created": 0,
        "owned_by": card.name.split("/")[0] if "/" in card.name else "local",
        "tasks": {task: {"inputs": list(program.inputs)} for task, program in card.programs.items()},
        "parameters": parameters(card, limits),
        "card": card.digest,
        "weights": {name: model.instance.version(name) for name in experts(card)},
        "dtypes": {name: c.dtype for name, c in card.components.items() if c.dtype},
        "device": model.instance.binding.device,
        "sampler": sampler_of(card),
        "lora": [use.adapter.digest for use in model.instance.adapters],
    }


def parameters(card: Card, limits: Limits) -> dict[str, object]:
    """A schema a task."""
    return {task: _schema(card, task, limits) for task in card.programs}


def _schema(card: Card, task: str, limits: Limits) -> dict[str, object]:
    hints = get_type_hints(Request)
    names = [field.name for field in fields(Request) if field.name not in _APART]
    properties = {name: _property(card, task, name, hints[name], limits) for name in names}
    return {"type": "object", "properties": properties, "required": ["prompt"], "additionalProperties": False}


def _property(card: Card, task: str, name: str, hint: object, limits: Limits) -> dict[str, object]:
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    named = [_NAMES[kind] for kind in kinds]  # type: ignore[index]
    found: dict[str, object] = {"type": named[0] if len(named) == 1 else named}
    if name in card.defaults[task]:
        found["default"] = card.defaults[task][name]
    return found | _bounds(card, limits).get(name, {})


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
        "num_frames": {"minimum": 1, "description": f"a multiple of {stride} plus 1"},
        "num_inference_steps": dict(steps),
        "guidance_scale": dict(scale),
        "guidance_scale_2": dict(scale),
        "flow_shift": {"exclusiveMinimum": 0, "maximum": limits.scale},
        "strength": {"exclusiveMinimum": 0, "maximum": 1},
        "max_sequence_length": {"minimum": 1, "maximum": limits.sequence},
        "fps": {"minimum": 1, "maximum": limits.fps},
        "seed": {"minimum": 0, "maximum": MAX_SEED, "description": "drawn if left out"},
        "mode": {"enum": list(MODES), "default": "fixed"},
        "rows": {"minimum": 1, "maximum": limits.rows, "description": "of fixed mode; measured if left out"},
    }
