"""The real-size Wan2.1-1.3B on a GPU with random weights, held against diffusers' own pipeline.

    python benchmarks/wan_h200.py --workspace DIR [--steps 6] [--frames 81] [--output result.json]

Builds the published configuration (transformer, UMT5-XXL encoder, autoencoder) with random normal weights in a
Diffusers folder, then runs `verify` on it: transformer in bfloat16, autoencoder and text encoder in float32, at
480x832x81. Prints each claim's figure, the first divergence and the peak memory of both. The Euler solver is checked
on the same transformer with a small text encoder, and on short clips in both precisions with every claim. Needs about
20 GB of disk and 40 GB of GPU memory.
"""

import argparse
import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from transformers import ByT5Tokenizer, UMT5Config, UMT5EncoderModel

from loopwright.parity import verify

UNIPC = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0, "num_train_timesteps": 1000}
XXL = {"vocab_size": 256384, "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64}
SMALL = {"vocab_size": 384, "d_model": 4096, "d_kv": 64, "d_ff": 64, "num_layers": 1, "num_heads": 2}


def build(folder: Path, device: str) -> None:
    """Write the checkpoint. The weights keep activations of order one, as trained ones do."""
    torch.manual_seed(0)
    with torch.device(device):
        transformer = WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=12,
            attention_head_dim=128,
            in_channels=16,
            out_channels=16,
            text_dim=4096,
            freq_dim=256,
            ffn_dim=8960,
            num_layers=30,
            cross_attn_norm=True,
            qk_norm="rms_norm_across_heads",
        )
        vae = AutoencoderKLWan()
        text_encoder = UMT5EncoderModel(UMT5Config(**XXL, feed_forward_proj="gated-gelu"))
    # stored in bfloat16 to halve the writing; Module.to, because diffusers' own keeps some layers in float32
    for module in (transformer, text_encoder):
        torch.nn.Module.to(module, torch.bfloat16)
    parts = {"transformer": transformer, "vae": vae, "text_encoder": text_encoder}
    WanPipeline(tokenizer=ByT5Tokenizer(), scheduler=UniPCMultistepScheduler(**UNIPC), **parts).save_pretrained(folder)


def with_euler(folder: Path, base: Path) -> None:
    """The same transformer and autoencoder under Euler, beside a small text encoder."""
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("text_encoder", "scheduler"), copy_function=os.link)
    (folder / "model_index.json").unlink()  # a link; this one is written anew
    FlowMatchEulerDiscreteScheduler(shift=3.0).save_pretrained(folder / "scheduler")
    torch.manual_seed(1)
    UMT5EncoderModel(UMT5Config(**SMALL, feed_forward_proj="gated-gelu")).save_pretrained(folder / "text_encoder")
    index = json.loads((base / "model_index.json").read_text())
    index["scheduler"] = ["diffusers", "FlowMatchEulerDiscreteScheduler"]
    (folder / "model_index.json").write_text(json.dumps(index))


def check(
    folder: Path, device: str, dtype: str, parameters: Mapping[str, int], against: str | None = None
) -> list[dict[str, object]]:
    """Run and print the claims of the folder in that precision of the transformer."""
    rows = []
    begun = time.perf_counter()
    options = {"device": device, "dtype": dtype, "task": "text_to_video", "against": against}
    for finding in verify(str(folder), **options, parameters=parameters):
        claim = finding.claim
        verdict = "holds" if finding.holds else "FAILS"
        print(
            f"{folder.name:6} {dtype:9} {parameters['num_frames']:3} frames {claim.level:10} {claim.reference:9} "
            f"{claim.metric} {finding.measured:.3g} (bound {claim.bound:g}) {verdict}: {finding.detail}",
            flush=True,
        )
        row: dict[str, object] = {"folder": folder.name, **parameters, **asdict(claim)}
        rows.append({**row, "measured": finding.measured, "detail": finding.detail})
    print(f"{folder.name} {dtype}: {time.perf_counter() - begun:.0f} s", flush=True)
    return rows


def main() -> None:
    """Build what is missing, check both solvers, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workspace", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--width", type=int, default=832)
    parser.add_argument("--frames", type=int, default=81)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    parameters = {
        "height": arguments.height,
        "width": arguments.width,
        "num_frames": arguments.frames,
        "num_inference_steps": arguments.steps,
    }
    unipc, euler = arguments.workspace / "unipc", arguments.workspace / "euler"
    begun = time.perf_counter()
    if not unipc.exists():
        build(unipc, arguments.device)
        with_euler(euler, unipc)
        print(f"built in {time.perf_counter() - begun:.0f} s", flush=True)
    short = {**parameters, "num_frames": min(9, arguments.frames)}
    rows = check(unipc, arguments.device, "bfloat16", parameters, "diffusers")
    rows += check(euler, arguments.device, "bfloat16", parameters, "diffusers")
    for dtype in ("bfloat16", "float32"):
        rows += check(euler, arguments.device, dtype, short)
    if arguments.output:
        arguments.output.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
