"""Does the adapter make things grey, and still what was asked for? Against the base, and against shuffled captions.

    python quality.py generate --lora grey-style/lora/transformer.safetensors \
        --control grey-shuffled/lora/transformer.safetensors --output judged
    python quality.py judge judged

Prompts are combinations that neither the model nor the adapter was trained on. Everybody is judged without colours, the
base too, by the judge of the shipped model on grey sprites. The first command wants a GPU and the second none.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import loopwright

sys.path.insert(0, str(Path(__file__).parent.parent / "tiny_wan"))

import evaluate as judging
from clips import Objects

SATURATION = 0.03  # the mean spread of a pixel's colours, of 1, that still counts as grey
WHO = ("base", "adapter", "shuffled captions")


def asked(names: list[str], count: int) -> list[judging.Asked]:
    """Held-out combinations with an object, no words."""
    return [each for each in judging.questions(names) if not each.word][:count]


def generate(args: argparse.Namespace) -> None:
    """Write what each of the three makes of the prompts."""
    names = Objects.load(args.sprites).names
    prompts = [each.prompt(names) for each in asked(names, args.prompts)]
    args.output.mkdir(parents=True, exist_ok=True)
    for who, adapter in zip(WHO, ([], [args.lora], [args.control]), strict=True):
        model = loopwright.load(args.model, lora=adapter)
        requests = [model.request(prompt, seed=seed, mode="throughput") for seed, prompt in enumerate(prompts)]
        found = {result.request.seed: result.video for result in model.run_all(requests)}
        np.savez_compressed(args.output / f"{who}.npz", np.stack([found[seed] for seed in range(len(prompts))]))
        print(f"{who}: {len(prompts)} clips", flush=True)


def grey(video: torch.Tensor) -> torch.Tensor:
    """The mean of the colours (dim -3), three times."""
    return video.mean(dim=-3, keepdim=True).expand(video.shape)


def colourless(objects: Objects) -> judging.Analyst:
    """The judge, on sprites and backgrounds without colours."""
    images = objects.images.clone()
    images[:, :3] = grey(images[:, :3])
    analyst = judging.Analyst(replace(objects, images=images))
    analyst.colours = grey(analyst.colours[..., None, None])[..., 0, 0]
    return analyst


def judge(args: argparse.Namespace) -> None:
    """Shares of the clips that are grey throughout, and that show the object asked for."""
    objects = Objects.load(args.sprites)
    analyst, figures = colourless(objects), {}
    for who in WHO:
        stored = torch.from_numpy(np.load(args.folder / f"{who}.npz")["arr_0"])
        videos = stored.float().permute(0, 1, 4, 2, 3) / 255
        wanted = asked(objects.names, len(videos))
        seen = analyst.read(grey(videos), wanted).sprite.tolist()
        spread = (videos.amax(dim=2) - videos.amin(dim=2)).flatten(1).mean(1)
        right = [sprite == each.index for sprite, each in zip(seen, wanted, strict=True)]
        figures[who] = {
            "clips": len(videos),
            "grey": float((spread < SATURATION).float().mean()),
            "object": sum(right) / len(right),
        }
        print(who, json.dumps(figures[who]), flush=True)
    (args.folder / "quality.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    make = commands.add_parser("generate")
    make.add_argument("--model", default="loopwright/tiny-wan")
    make.add_argument("--lora", default="grey-style/lora/transformer.safetensors")
    make.add_argument("--control", default="grey-shuffled/lora/transformer.safetensors")
    make.add_argument("--prompts", type=int, default=100)
    make.add_argument("--output", type=Path, default=Path("judged"))
    make.set_defaults(run=generate)
    read = commands.add_parser("judge")
    read.add_argument("folder", type=Path)
    read.set_defaults(run=judge)
    for command in (make, read):
        command.add_argument("--sprites", type=Path, default=Path("../tiny_wan/sprites.npz"))
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
