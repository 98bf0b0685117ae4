"""Write tiny-wan's card beside its weights: what the checkpoint's configurations cannot say.

    python card.py --model src/loopwright/zoo/tiny-wan

Its defaults are those it was trained and judged with; its weights are stored in bfloat16 and run in float32.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from loopwright.card import Recipe, derive, dumps
from loopwright.models import wan
from loopwright.weights.load import count_parameters

DEFAULTS = {
    "height": 64,
    "width": 64,
    "num_frames": 9,
    "num_inference_steps": 24,
    "guidance_scale": 3.0,
    "max_sequence_length": 128,
    "fps": 8,
}


def main() -> None:
    """Describe the folder, add what is this model's own, write card.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    folder = parser.parse_args().model
    card = wan.describe(folder, "loopwright/tiny-wan")
    components = {
        name: replace(
            component,
            dtype="float32" if component.dtype else "",
            parameters=count_parameters(folder / component.subfolder),
        )
        for name, component in card.components.items()
    }
    card = derive(
        card,
        components=components,
        defaults={task: {**own, **DEFAULTS} for task, own in card.defaults.items()},
        recipe=Recipe(kind="base", assumes=card.recipe.assumes, precision=card.recipe.precision),
    )
    (folder / "card.json").write_text(dumps(card), encoding="utf-8")
    print(f"{folder / 'card.json'}: {card.digest}, {sum(c.parameters for c in components.values()):,} parameters")


if __name__ == "__main__":
    main()
