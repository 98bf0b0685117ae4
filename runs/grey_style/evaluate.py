"""Does the adapter make things grey, and still what was asked for? Against the base, and against shuffled captions.

    python clips.py --output clips && python evaluate.py --shuffle clips
    loopwright train lora.yaml
    loopwright train lora.yaml --set output=grey-shuffled --set data.dataset=clips/shuffled.jsonl
    python evaluate.py --sprites ../tiny_wan/sprites.npz --lora grey-style/lora/transformer.safetensors \
        --control grey-shuffled/lora/transformer.safetensors --output quality.json

Prompts are combinations that neither the model nor the adapter was trained on. Everybody is judged without colours, the
base too, by the judge of the shipped model on grey sprites.
"""

import argparse
import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import loopwright

SATURATION = 0.03  # the mean spread of a pixel's colours, of 1, that still counts as grey


def shuffle(folder: Path) -> None:
    """Every clip gets the caption of another one."""
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    order = random.Random(0).sample(range(len(rows)), len(rows))
    after = dict(zip(order, order[1:] + order[:1], strict=True))
    moved = [row | {"prompt": rows[after[index]]["prompt"]} for index, row in enumerate(rows)]
    assert all(a["video"] == b["video"] and a["prompt"] != b["prompt"] for a, b in zip(rows, moved, strict=True))
    (folder / "shuffled.jsonl").write_text("".join(json.dumps(row) + "\n" for row in moved), encoding="utf-8")


def grey(video: torch.Tensor) -> torch.Tensor:
    """The mean of the colours (dim -3), three times."""
    return video.mean(dim=-3, keepdim=True).expand(video.shape)


class Judge:
    """The shipped model's own, on sprites and backgrounds without colours."""

    def __init__(self, sprites: Path, count: int) -> None:
        sys.path.insert(0, str(Path(__file__).parent.parent / "tiny_wan"))
        import clips
        import evaluate as judging

        drawn = clips.Sprites.load(sprites, "cpu")
        images = drawn.images.clone()
        images[:, :3] = grey(images[:, :3])
        self._analyst = judging.Analyst(replace(drawn, images=images))
        self._analyst.colours = grey(self._analyst.colours[..., None, None])[..., 0, 0]
        _, held_out = clips.split_triples(drawn.names)
        order = torch.randperm(len(held_out), generator=torch.Generator().manual_seed(1))
        self.triples = held_out[order[:count]]
        grounds = list(clips.BACKGROUNDS)
        self.motions = [clips.MOTIONS[motion] for motion in self.triples[:, 1].tolist()]
        self.prompts = [
            clips.caption(drawn.names[i], clips.MOTIONS[j], grounds[k]) for i, j, k in self.triples.tolist()
        ]

    def objects(self, videos: torch.Tensor) -> float:
        """The share of clips [B, T, 3, H, W] in 0..1 whose object is the one asked for."""
        reading = self._analyst.read(grey(videos), self.motions)
        return float((reading.sprite == self.triples[:, 0]).float().mean())


def sampled(prompts: list[str], lora: list[str], steps: int) -> torch.Tensor:
    """What the model makes of the prompts: [B, T, 3, H, W] in 0..1."""
    model = loopwright.load("loopwright/tiny-wan", lora=lora)
    requests = [
        model.request(prompt, seed=seed, num_inference_steps=steps, mode="throughput")
        for seed, prompt in enumerate(prompts)
    ]
    found = {result.request.seed: result.video for result in model.run_all(requests)}
    videos = np.stack([found[seed] for seed in range(len(prompts))])
    return torch.from_numpy(videos).float().permute(0, 1, 4, 2, 3) / 255


def share_grey(videos: torch.Tensor) -> float:
    spread = (videos.amax(dim=2) - videos.amin(dim=2)).flatten(1).mean(1)
    return float((spread < SATURATION).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shuffle", type=Path, help="write shuffled.jsonl beside rows.jsonl of this folder, and end")
    parser.add_argument("--sprites", type=Path, default=Path("../tiny_wan/sprites.npz"))
    parser.add_argument("--lora", default="grey-style/lora/transformer.safetensors")
    parser.add_argument("--control", default="grey-shuffled/lora/transformer.safetensors")
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--output", type=Path, default=Path("quality.json"))
    arguments = parser.parse_args()
    if arguments.shuffle:
        shuffle(arguments.shuffle)
        return
    judge = Judge(arguments.sprites, arguments.prompts)
    figures: dict[str, object] = {"prompts": arguments.prompts, "steps": arguments.steps}
    for name, lora in {"base": [], "adapter": [arguments.lora], "shuffled captions": [arguments.control]}.items():
        videos = sampled(judge.prompts, lora, arguments.steps)
        figures[name] = {"grey": share_grey(videos), "object": judge.objects(videos)}
        print(name, json.dumps(figures[name]), flush=True)
        arguments.output.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
