"""Write the trained networks as a folder that diffusers' WanPipeline loads.

    python export.py --state state --output tiny-wan

Before the text-to-video stage has run, the transformer is exported untrained: the shapes are final.
"""

import argparse
import json
from pathlib import Path

import torch
from diffusers import WanPipeline
from networks import build_scheduler, build_tokenizer, build_transformer
from safetensors.torch import load_file
from torch import nn
from train import progress_file, trained_autoencoder, trained_text_encoder

FLOW_SHIFT = 3.0


def averaged_transformer(state: Path) -> nn.Module:
    """The transformer with its averaged weights."""
    transformer = build_transformer()
    path = progress_file(state, "average")
    if path.exists():
        values = load_file(path)
        with torch.no_grad():
            for name, parameter in transformer.named_parameters():
                parameter.copy_(values[name])
    return transformer


def export(state: Path, output: Path, shift: float, warm_start: Path | None) -> None:
    """Assemble the pipeline in bfloat16 and save it."""
    vae = trained_autoencoder(state, warm_start, torch.device("cpu"))
    statistics = state / "latents.pt"
    if statistics.exists():
        cache = torch.load(statistics, map_location="cpu", weights_only=True)
        vae.register_to_config(latents_mean=cache["mean"].tolist(), latents_std=cache["std"].tolist())
    transformer = averaged_transformer(state)
    text_encoder = trained_text_encoder(state)
    # Module.to() and not the pipeline's: diffusers would keep some of the transformer's layers in float32.
    for module in (vae, transformer, text_encoder):
        nn.Module.to(module, torch.bfloat16)
    pipeline = WanPipeline(
        tokenizer=build_tokenizer(),
        text_encoder=text_encoder,
        vae=vae,
        scheduler=build_scheduler(shift),
        transformer=transformer,
    )
    pipeline.save_pretrained(output, safe_serialization=True)
    config = output / "vae" / "config.json"  # a warm start leaves the folder it came from in here
    values = {name: value for name, value in json.loads(config.read_text()).items() if name != "_name_or_path"}
    config.write_text(json.dumps(values, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--state", type=Path, default=Path("state"))
    parser.add_argument("--output", type=Path, default=Path("tiny-wan"))
    parser.add_argument("--shift", type=float, default=FLOW_SHIFT)
    parser.add_argument("--warm-start", type=Path, default=None, help="folder to take a missing autoencoder from")
    args = parser.parse_args()
    export(args.state, args.output, args.shift, args.warm_start)
    for path in sorted(args.output.rglob("*")):
        if path.is_file():
            print(f"{path.stat().st_size:>10} {path.relative_to(args.output)}")


if __name__ == "__main__":
    main()
