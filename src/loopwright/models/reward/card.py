"""What a scorer is, by the configuration that transformers saves with it.

card = describe(Path("clip-vit-large-patch14"))     # config.json, weights, tokenizer and image processor in one folder
"""

from collections.abc import Mapping
from pathlib import Path

from ...card import Card, Component, Program, Recipe, Stage
from ...errors import CardError
from ..wan.card import read_json

ARCHITECTURES = ("CLIPModel",)
TASK = "score"
TEXT, SCORE = "clip.text/v1", "clip.score/v1"
FRAMES = 4  # of a video are looked at


def describe(folder: Path, name: str = "") -> Card:
    """The card of a folder. Raises WeightsError or CardError naming the file and what is wrong with it."""
    file = folder / "config.json"
    length = _text_length(read_json(file), file)
    stages = (
        Stage("text", "text", (), ("text",), ("tokenizer", "model")),
        Stage("score", "score", ("text",), ("scores",), ("image_processor", "model")),
    )
    return Card(
        name=name or folder.resolve().name,
        family="reward",
        components={
            "model": Component("transformers.CLIPModel", dtype="float32"),
            "tokenizer": Component("transformers.AutoTokenizer"),
            "image_processor": Component("transformers.CLIPImageProcessor"),
        },
        loops={"text": TEXT, "score": SCORE},
        programs={TASK: Program(stages, ("video",), {"score": "scores"})},
        defaults={TASK: _defaults(length)},
        settings={"experts": ("model",), "size_multiple": 1, "frame_stride": 1, "boundary": None, "frames": FRAMES},
        recipe=Recipe(assumes=(TEXT, SCORE)),
        home=str(folder),
    )


def _text_length(config: Mapping[str, object], file: Path) -> int:
    named = config.get("architectures")
    if not isinstance(named, list) or not set(named) & set(ARCHITECTURES):
        raise CardError(f"{file}: no scorer of that class", value=named, choices=ARCHITECTURES)
    text = config.get("text_config")
    length = text.get("max_position_embeddings", 77) if isinstance(text, dict) else 77
    if not isinstance(length, int):
        raise CardError(f"{file}: max_position_embeddings must be whole", value=length)
    return length


def _defaults(length: int) -> dict[str, str | int | float | None]:
    """A request has all of its parameters, also those that say nothing to a scorer."""
    return {
        "negative_prompt": "",
        "height": 1,
        "width": 1,
        "num_frames": 1,
        "num_inference_steps": 1,
        "guidance_scale": 1.0,
        "guidance_scale_2": None,
        "flow_shift": None,
        "strength": 1.0,
        "max_sequence_length": length,
        "fps": 1,
    }
