"""The model with a run's averaged weights so far, from its newest checkpoint: to look at, or to go on from elsewhere.

    python average.py state/text_to_video --start state/start --output state/average

A run that ends writes the same as `model-ema`.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from diffusers import WanTransformer3DModel
from safetensors import safe_open

from loopwright.training.checkpoint import damage, found

_PREFIX = "ema.transformer."


def averaged(run: Path) -> tuple[int, dict[str, torch.Tensor]]:
    """The step, and the transformer's averaged weights in bfloat16."""
    checkpoint = next((path for path in found(run / "checkpoints") if not damage(path)), None)
    if checkpoint is None:
        raise SystemExit(f"{run} holds no whole checkpoint")
    tensors = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            names = [name for name in file.keys() if name.startswith(_PREFIX)]  # noqa: SIM118
            tensors |= {name.removeprefix(_PREFIX): file.get_tensor(name).bfloat16() for name in names}
    return int(json.loads((checkpoint / "state.json").read_text())["step"]), tensors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--start", type=Path, required=True, help="the folder that the run started from")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    step, tensors = averaged(args.run)
    shutil.copytree(args.start, args.output, dirs_exist_ok=True)
    transformer = WanTransformer3DModel.from_config(WanTransformer3DModel.load_config(args.start / "transformer"))
    transformer.load_state_dict(tensors)
    torch.nn.Module.to(transformer, torch.bfloat16).save_pretrained(args.output / "transformer")
    print(f"{args.output}: averaged weights after step {step}")


if __name__ == "__main__":
    main()
