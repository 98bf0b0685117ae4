"""Put a trained model where it ships, with its card: what the checkpoint's configurations cannot say.

    python ship.py state/text_to_video/model-ema --output ../../src/loopwright/zoo/tiny-wan

Its defaults are those it was trained and judged with; its weights are stored in bfloat16 and run in float32.
"""

import argparse
import shutil
from dataclasses import replace
from pathlib import Path

from huggingface_hub import save_torch_state_dict
from networks import TEXT_LENGTH
from safetensors.torch import load_file

from loopwright.card import Recipe, derive, dumps
from loopwright.models import wan
from loopwright.weights.load import count_parameters

DEFAULTS = {
    "height": 64,
    "width": 64,
    "num_frames": 9,
    "num_inference_steps": 24,
    "guidance_scale": 3.0,
    "max_sequence_length": TEXT_LENGTH,
    "fps": 8,
}
PARTS = ("model_index.json", "scheduler", "text_encoder", "tokenizer", "transformer", "vae")
MOST, SHARD = 28_000_000, 14_000_000  # bytes of all that ships, and of a file


def card(folder: Path) -> str:
    """The card's text: described from the folder, with what is this model's own."""
    found = wan.describe(folder, "loopwright/tiny-wan")
    components = {
        name: replace(
            component,
            dtype="float32" if component.dtype else "",
            parameters=count_parameters(folder / component.subfolder),
        )
        for name, component in found.components.items()
    }
    made = derive(
        found,
        components=components,
        defaults={task: {**own, **DEFAULTS} for task, own in found.defaults.items()},
        recipe=Recipe(kind="base", assumes=found.recipe.assumes, precision=found.recipe.precision),
    )
    return dumps(made)


def ship(model: Path, output: Path) -> None:
    """Replace what is there; weights in files that are small enough for a repository."""
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    for part in PARTS:
        copy = shutil.copytree if (model / part).is_dir() else shutil.copy
        copy(model / part, output / part)
    for part in ("transformer", "vae"):
        weights = output / part / "diffusion_pytorch_model.safetensors"
        tensors = load_file(weights)
        weights.unlink()
        pattern = "diffusion_pytorch_model{suffix}.safetensors"
        save_torch_state_dict(tensors, weights.parent, filename_pattern=pattern, max_shard_size=SHARD)
    (output / "card.json").write_text(card(output), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    ship(args.model, args.output)
    size = sum(path.stat().st_size for path in args.output.parent.rglob("*") if path.is_file())
    print(f"{args.output}: {size:,} bytes with all beside it")
    if size > MOST:
        raise SystemExit(f"more than {MOST:,}")


if __name__ == "__main__":
    main()
