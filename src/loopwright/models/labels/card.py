"""What a label-conditional model is, by its network's configuration.

card = describe(Path("out/digits"))         # reads transformer/config.json
"""

from pathlib import Path

from ...card import Card, Component, Program, Recipe, Stage
from ...errors import CardError
from ..wan.card import read_json

TASK = "label_to_image"
SOLVERS = ("flow_euler.cfg/v1", "flow_unipc.cfg/v1", "flow_sde.cfg/v1", "dance_sde.cfg/v1", "cps.cfg/v1")
TEXT, PIXELS = "labels.text/v1", "labels.pixels/v1"
KIND = "loopwright.models.labels.network.LabelFlow"


def describe(folder: Path, name: str = "") -> Card:
    """The card of a folder. Raises WeightsError or CardError naming the file and what is wrong with it."""
    file = folder / "transformer" / "config.json"
    config = read_json(file)
    labels, size, channels = config.get("labels"), config.get("size"), config.get("channels")
    if not isinstance(labels, list) or not labels or not all(isinstance(label, str) for label in labels):
        raise CardError(f"{file}: labels must be a list of texts", value=labels)
    if not isinstance(size, int) or channels not in (1, 3):
        raise CardError(f"{file}: size must be whole and channels 1 or 3", value=[size, channels])
    stages = (
        Stage("text", "text", (), ("prompt_embeds", "negative_embeds")),
        Stage("denoise", "denoise", ("prompt_embeds", "negative_embeds"), ("latents",), ("transformer",)),
        Stage("decode", "decode", ("latents",), ("frames",)),
    )
    return Card(
        name=name or folder.resolve().name,
        family="labels",
        components={"transformer": Component(KIND, subfolder="transformer", dtype="float32")},
        loops={"text": TEXT, "denoise": SOLVERS[0], "decode": PIXELS},
        programs={TASK: Program(stages, (), {"video": "frames", "latents": "latents"})},
        defaults={
            TASK: {
                "negative_prompt": "",
                "height": size,
                "width": size,
                "num_frames": 1,
                "num_inference_steps": 10,
                "guidance_scale": 1.0,
                "guidance_scale_2": None,
                "flow_shift": 3.0,
                "strength": 1.0,
                "max_sequence_length": 1,
                "fps": 1,
            }
        },
        settings={
            "labels": tuple(labels),
            "channels": channels,
            "spatial_stride": 1,
            "frame_stride": 1,
            "size_multiple": size,
            "train_steps": 1000,
            "solver_order": 2,
            "experts": ("transformer",),
            "boundary": None,
            "guidance": "serial",
        },
        recipe=Recipe(assumes=(TEXT, PIXELS, *SOLVERS), precision=("float32",)),
        home=str(folder),
    )
