"""What it costs to decode single pictures: as diffusers does, and as throughput mode does.

    python benchmarks/pictures.py [--device cuda] [--size 256] [--rows 1 8] [--output results.json]

Wan2.1's autoencoder at random, float32 on a CPU and bfloat16 on CUDA; decoders alone, of latents that lie there.
"""

import argparse
import json
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan

from loopwright.models.wan import forward
from timing import interleaved, relative


def measured(vae: AutoencoderKLWan, device: str, size: int, rows: int, rounds: int) -> dict[str, object]:
    """Milliseconds a picture of each, and how far apart the frames are."""
    x = torch.randn(rows, vae.config.z_dim, 1, size // 8, size // 8, device=device, dtype=vae.dtype)
    parts = {"vae": vae}
    runs = {
        "diffusers": lambda: vae.decode(x, return_dict=False)[0],
        "decode_chunk": lambda: forward.decode_chunk(parts, x=x)["out"],
        "decode_picture": lambda: forward.decode_picture(parts, x=x)["out"],
    }
    figures = interleaved(runs, device=device, warm=1 if device == "cpu" else 3, rounds=rounds)
    error = relative(runs["decode_picture"]().float(), runs["decode_chunk"]().float())
    times: dict[str, object] = {name: figure.row(1e3 / rows) for name, figure in figures.items()}
    return {"rows": rows, **times, "relative error": error}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    vae = AutoencoderKLWan().eval().to(args.device)
    if args.device != "cpu":
        torch.nn.Module.to(vae, torch.bfloat16)
    with torch.no_grad():
        rows = [measured(vae, args.device, args.size, rows, args.rounds) for rows in args.rows]
    told = {"device": args.device, "size": args.size, "threads": 1, "torch": torch.__version__, "milliseconds": rows}
    print(json.dumps(told, indent=1))
    if args.output:
        args.output.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
