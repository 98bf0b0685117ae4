"""The adapters that a run had at each checkpoint it kept, to judge and to choose among: <step>.safetensors.

python runs/two_steps/adapters.py out/two_steps/words --output out/two_steps/words/adapters
"""

import argparse
from pathlib import Path

import torch
import yaml
from safetensors import safe_open

from loopwright.training.checkpoint import damage, found
from loopwright.weights import lora

PREFIX, NAME = "weights.", ".default."  # of a checkpoint's tensors, and peft's for the adapter that is trained


def adapter(checkpoint: Path) -> dict[str, torch.Tensor]:
    """A and B of each layer, float32, in diffusers' names."""
    tensors = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                if name.startswith(PREFIX):
                    tensors[name.removeprefix(PREFIX).replace(NAME, ".")] = file.get_tensor(name)
    return tensors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run's output")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    settings = yaml.safe_load((args.run / "run.yaml").read_text(encoding="utf-8"))["lora"]
    whole = [path for path in found(args.run / "checkpoints") if not damage(path)]
    if not whole:
        raise SystemExit(f"{args.run} holds no whole checkpoint")
    for checkpoint in whole:
        target = args.output / f"{checkpoint.name}.safetensors"
        target.parent.mkdir(parents=True, exist_ok=True)
        lora.save(target, adapter(checkpoint), alpha=settings["alpha"] or settings["rank"])
        print(target)


if __name__ == "__main__":
    main()
